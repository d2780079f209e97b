"""The kernels in plain PyTorch."""

"""The kernels in plain PyTorch: oracle, documentation, and what runs where there is no Triton."""

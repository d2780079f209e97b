"""The kernels in plain PyTorch, one file for each: oracle, documentation, and what runs where there is no Triton."""

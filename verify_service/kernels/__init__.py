"""The kernels of a step: what each promises, its plain PyTorch form, and its Triton form."""

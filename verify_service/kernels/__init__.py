"""Plain-PyTorch kernels of the verify step, one file each: the CPU path, and the oracle of their GPU twins."""

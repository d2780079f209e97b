"""Triton kernels of the draft service, one file each, beside plain twins of the same signature."""

"""Triton functions that kernels of several services are made of."""

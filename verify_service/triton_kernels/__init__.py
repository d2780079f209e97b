"""Triton kernels of the verify step, one file each, beside plain-PyTorch twins of the same signature.

Static buffers of fixed addresses in and out, padded to (batch, nodes): nothing that a kernel reads comes from the host
within a step. Only the CUDA engine imports this package, and nothing else in the service imports Triton.
"""

"""The kernels in Triton. Only these import Triton."""

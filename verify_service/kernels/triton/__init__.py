"""The kernels in Triton, one file for each launcher. Only these import Triton."""

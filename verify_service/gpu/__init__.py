"""Passes over static buffers, as graphs of kernels: the way of a GPU, and of tests without one."""

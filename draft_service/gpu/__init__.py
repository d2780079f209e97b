"""Passes, new rows and trees as graphs over static buffers: the way of a GPU."""

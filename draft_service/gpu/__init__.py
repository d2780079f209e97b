"""Passes, new rows and trees on a GPU: graphs over static buffers."""

"""Passes over the context cache as it lies: the way of a CPU."""

"""Passes on a CPU: over the context cache as it lies."""

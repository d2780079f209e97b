"""Figures out of what was measured: values, pure functions, and a plot. Knows nothing of services."""

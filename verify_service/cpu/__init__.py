"""Passes over whatever shapes come, as graphs of the compiler that see dense masks: the way of a CPU."""

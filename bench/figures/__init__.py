"""Figures out of what was measured. Pure functions, tables and plots."""

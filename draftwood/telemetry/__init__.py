"""Metrics and traces of the services: what is measured, where it is read, how a trace goes from one to the next."""

"""gRPC as all services use it: channels, statuses, messages to values."""

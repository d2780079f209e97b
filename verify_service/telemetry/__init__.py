"""What the verify service exports: metrics, spans of requests and of steps."""

"""What the gateway exports: metrics, and the span of a request."""

"""The wire of the verify service: messages to values and back, and what a request gets where it says nothing."""

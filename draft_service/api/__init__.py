"""The wire of the draft service: messages to values and back, and which stream owns which sequence."""

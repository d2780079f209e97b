"""The device loop, and who gets its next turn."""

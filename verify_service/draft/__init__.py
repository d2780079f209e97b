"""The verify side of the draft protocol: what a drafter is told, and the stream to it."""

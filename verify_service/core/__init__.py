"""The values that everything else speaks of: requests, events, sequences, what a walk accepts. No models."""

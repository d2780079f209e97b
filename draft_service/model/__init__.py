"""A DFlash checkpoint: its settings, its tensors, its layers."""

"""Text to token ids and back: templates, tokenizers, stop strings."""

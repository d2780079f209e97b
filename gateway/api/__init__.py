"""OpenAI's requests and responses as values."""

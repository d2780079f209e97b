"""OpenAI's requests and responses as values: requests made into plans, answers into objects."""

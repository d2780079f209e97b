"""OpenAI-compatible REST in front of a verify service: text in, text out, without torch."""

"""Keys and values of committed tokens, and whose late rows are dropped."""

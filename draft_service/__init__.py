"""The draft service: committed tokens' feature rows in, draft trees out."""

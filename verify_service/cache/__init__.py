"""Committed state: KV pages with feature rows beside them, and recurrent-state slots."""

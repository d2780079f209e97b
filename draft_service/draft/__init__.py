"""One message of a verify service served: rows taken, blocks passed, trees built."""

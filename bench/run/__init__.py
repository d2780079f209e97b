"""What measures: services, prompts, rounds, crowds, the reference, and the report at the end."""

"""What is measured, while it is measured: services, prompts, rounds, crowds, the reference."""

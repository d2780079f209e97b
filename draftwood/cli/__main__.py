"""`python -m draftwood.cli`."""

from draftwood.cli import main

main(prog_name="draftwood")

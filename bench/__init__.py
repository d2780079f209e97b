"""`draftwood bench`: measures speed, checks exactness, and loads the services. One file for each command."""

from __future__ import annotations

import click

from draftwood.cli.groups import LazyGroup

COMMANDS = {
    "decode": ("bench.decode:decode", "Compare plain decoding, chains and trees."),
    "sweep": ("bench.sweep:sweep", "Speed and step times by tree budget."),
    "prefill": ("bench.prefill:prefill", "What a long prompt costs the answers beside it."),
    "soak": ("bench.soak:soak", "Load the services for minutes: nothing may be lost or wrong."),
    "project": (
        "bench.project:command",
        "Project tokens/s from step times and an acceptance profile.",
    ),
    "exact": ("bench.exact:exact", "Compare answers with transformers' own, token by token."),
}


@click.group(cls=LazyGroup, lazy_commands=COMMANDS)
def bench() -> None:
    """Measure speed and check exactness.

    Each command starts the services on free ports, or uses a running verify service, and talks gRPC straight to it.
    """

"""The command line, `draftwood`. It starts services only as `python -m SERVICE` and never imports one.

Commands are imported when they are called, so that `draftwood --help` answers at once.
"""

from __future__ import annotations

import click

from draftwood import __version__
from draftwood.cli.groups import LazyGroup

COMMANDS = {
    "up": ("draftwood.cli.up:up", "Start all three services and keep them running."),
    "draft": ("draftwood.cli.services:draft", "Run the draft service alone."),
    "verify": ("draftwood.cli.services:verify", "Run the verify service alone."),
    "gateway": ("draftwood.cli.services:gateway", "Run the gateway alone."),
    "chat": ("draftwood.cli.chat:chat", "Ask one question and stream the answer."),
    "check": ("draftwood.cli.check:check", "Say whether services are healthy."),
    "info": (
        "draftwood.cli.info:info",
        "Show versions, processor features, models, the memory that they need, and default settings.",
    ),
    "demo": ("draftwood.cli.demo:demo", "Answer one question with draft trees and without, and compare."),
    "bench": ("bench:bench", "Measure speed and check exactness."),
}


@click.group(cls=LazyGroup, lazy_commands=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="draftwood")
def main() -> None:
    """Lossless tree speculative decoding, split over three services.

    A small draft model proposes a tree of tokens, the target model checks the whole tree in one pass, and a gateway
    serves the result as an OpenAI-compatible API.

    \b
    Examples:
      draftwood demo                       see it work, in under a minute
      draftwood up                         serve the embedded model pair on port 8000
      draftwood up --target DIR --draft DIR
      draftwood chat "Why is the sky blue?"
      draftwood bench decode
    """

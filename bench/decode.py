"""`draftwood bench decode`: plain decoding, chains and trees in the same rounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bench.figures.values import SHADOW, Configuration
from bench.run.experiment import build_experiment, experiment_options, run
from bench.run.report import decode_table, publish
from draftwood.cli.options import int_list
from draftwood.cli.stack.launch import run_stoppable
from draftwood.config import ALGORITHMS
from draftwood.errors import ConfigError


@click.command()
@click.option(
    "--algorithms",
    default="none,dflash,ddtree",
    show_default=True,
    help="What to compare: none (autoregressive), dflash (a chain), ddtree (a tree), shadow (a chain with the tree "
    "verified beside it: what the tree would have won).",
)
@click.option(
    "--budgets", default="7,15,31", show_default=True, callback=int_list, help="Tree budgets: nodes without the root."
)
@click.option("--chains", default="7,15", show_default=True, callback=int_list, help="Lengths of chains.")
@experiment_options
def decode(
    algorithms: str, budgets: tuple[int, ...], chains: tuple[int, ...],
    json_path: Path | None, plot_path: Path | None, **values: Any,
) -> None:  # fmt: skip
    """Compare plain decoding, chains and trees.

    PROMPTS is a file of JSON lines with "prompt", "text", "question" or "turns", or of plain text with one prompt per
    line; without it, the shipped questions are used. Every configuration decodes all prompts once in each round, the
    order rotates, and ratios are taken within rounds. Speed counts the tokens after the first and the time from the
    first to the last.

    \b
    Examples:
      draftwood bench decode
      draftwood bench decode questions.jsonl --target DIR --draft DIR --budgets 15,31,63
      draftwood bench decode --reference --json result.json --plot result.png
      draftwood bench decode --verify 127.0.0.1:50051 --algorithms none,ddtree --concurrency 4
    """
    names = [name.strip() for name in algorithms.split(",") if name.strip()]
    experiment = build_experiment(values, configurations(names, budgets, chains))
    publish(run_stoppable(run(experiment)), decode_table, json_path, plot_path)


def configurations(names: Sequence[str], budgets: Sequence[int], chains: Sequence[int]) -> list[Configuration]:
    """Each algorithm with each of its budgets; a budget of 0 is plain decoding."""
    known = (*ALGORITHMS, SHADOW)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ConfigError(
            f"--algorithms: {', '.join(unknown) or 'nothing'} is not among {', '.join(known)}", field="algorithms"
        )
    found: dict[Configuration, None] = {}  # ordered, without repeats
    for name in names:
        sizes = {"none": (0,), "dflash": chains, "ddtree": budgets, SHADOW: budgets}[name]
        found |= dict.fromkeys(Configuration(name if size > 0 else "none", max(size, 0)) for size in sizes)
    return list(found)

"""`draftwood bench sweep`: what each tree budget costs and wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bench.decode import configurations
from bench.run.experiment import build_experiment, experiment_options, run
from bench.run.report import publish, sweep_table
from draftwood.cli.options import int_list
from draftwood.cli.stack.launch import run_stoppable


@click.command()
@click.option(
    "--budgets",
    default="0,7,15,31,63",
    show_default=True,
    callback=int_list,
    help="Tree budgets: nodes without the root; 0 is plain decoding.",
)
@click.option(
    "--chains", default="7,15", show_default=True, callback=int_list, help="Lengths of chains; 0 leaves them out."
)
@experiment_options
def sweep(
    budgets: tuple[int, ...], chains: tuple[int, ...], json_path: Path | None, plot_path: Path | None, **values: Any
) -> None:
    """Speed and step times by tree budget.

    Measures as `draftwood bench decode` does, and compares with plain decoding and with the fastest chain.

    \b
    Examples:
      draftwood bench sweep
      draftwood bench sweep --budgets 0,3,7,11,15 --limit 8
    """
    found = configurations(["ddtree", "dflash"], budgets, [length for length in chains if length > 0])
    publish(run_stoppable(run(build_experiment(values, found))), sweep_table, json_path, plot_path)

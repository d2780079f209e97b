"""`draftwood bench project`: measured step times and a measured acceptance, put together."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.table import Table

from bench.figures.projection import SHIPPED_PROFILE, AcceptanceProfile, Projected, StepTimes, project
from draftwood.cli.console import out
from draftwood.cli.options import FiniteRange, int_list

LABEL = "Projection, not a measurement"


@click.command("project")
@click.argument("steps", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--profile",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=SHIPPED_PROFILE,
    help="Acceptance: a profile, or the JSON of bench decode or sweep. By default that of the embedded pair.",
)
@click.option("--chains", default="7,15", show_default=True, callback=int_list, help="Lengths of chains.")
@click.option(
    "--draft",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What benchmarks/draft.py wrote about the drafter: its pass by batch.",
)
@click.option("--draft-ms", type=FiniteRange(0), help="A draft pass with its tree, in place of what was measured.")
@click.option("--transport-ms", type=FiniteRange(0), help="To the drafter and back; 0 where nothing says.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    steps: Path,
    profile: Path,
    chains: tuple[int, ...],
    draft: Path | None,
    draft_ms: float | None,
    transport_ms: float | None,
    *,
    as_json: bool,
) -> None:
    """Project tokens/s from step times and an acceptance profile.

    STEPS is what benchmarks/step.py wrote about a shape. The profile says how many tokens a step gives, with a chain by
    depth and with a tree by budget; how well your drafter does on your prompts decides everything, and a shape with
    random weights cannot tell. So this is always a projection, and says so.

    \b
    Examples:
      draftwood bench project benchmarks/results/h200/step_Qwen3.6-27B.json \\
        --draft benchmarks/results/h200/draft_Qwen3.6-27B-DFlash.json --transport-ms 0.3
      draftwood bench project step.json --profile my-decode.json --draft-ms 2.2 --transport-ms 0.3
    """
    times, acceptance = StepTimes.read(steps), AcceptanceProfile.read(profile)
    times = times if draft is None else times.with_draft(draft)
    rows = project(times, acceptance, chains, draft=draft_ms, transport=transport_ms)
    caption = (
        f"{LABEL}: step times of {times.shape} on {times.gpu} at a context of {times.context}, with the acceptance of "
        f"another run ({acceptance.name}: {acceptance.source})."
    )
    if as_json:
        click.echo(json.dumps({"projection": True, "label": caption, "rows": [asdict(row) for row in rows]}, indent=2))
        return
    out.print(_table(rows))
    out.print(caption, style="dim", markup=False)


def _table(rows: list[Projected]) -> Table:
    table = Table(title=LABEL, title_justify="left", box=None)
    headings = ("batch", "", "nodes\nverified", "tokens\nper step", "ms\nper step", "tokens/s", "× none")
    for heading in headings:
        table.add_column(heading, justify="left" if not heading else "right")
    for row in rows:
        table.add_row(
            str(row.batch), row.configuration, str(row.nodes), f"{row.tokens_per_step:.2f}", f"{row.ms_per_step:.2f}",
            f"{row.tokens_per_s:.0f}", "–" if row.ratio_to_none is None else f"{row.ratio_to_none:.2f}",
        )  # fmt: skip
    return table

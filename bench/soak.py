"""`draftwood bench soak`: many clients, hang-ups and a drafter that is killed again and again; nothing may be lost."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.markup import escape

from bench.run.options import json_option, prompts_argument, write_json
from bench.run.prompts import load
from bench.run.trial import Outcome, Plan, run_trial
from draftwood.cli.console import out
from draftwood.cli.options import FiniteRange
from draftwood.cli.stack.launch import private_settings, run_stoppable
from draftwood.cli.stack.stack import NO_DRAFTER
from draftwood.errors import ConfigError

MIB = 1 << 20


@click.command()
@prompts_argument
@click.option(
    "--clients", type=click.IntRange(1), default=32, show_default=True, help="Clients, one request at a time."
)
@click.option("--seconds", type=FiniteRange(1), default=300.0, show_default=True, help="How long they go on.")
@click.option("--hang-ups", type=FiniteRange(0, 1), default=0.05, show_default=True, help="Share of requests given up.")
@click.option(
    "--kill-every", "kill_every_s", type=FiniteRange(0), default=20.0, show_default=True,
    help="Seconds between SIGKILLs of the drafter, which is started again; 0 kills none.",
)  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Seed of what the clients ask.")
@json_option
@private_settings(dtype="float32")
def soak(prompts: Path | None, json_path: Path | None, **values: Any) -> None:
    """Load the services for minutes: nothing may be lost or wrong.

    Clients send requests of mixed lengths and algorithms and hang up now and then, and the drafter is killed again and
    again. Every whole answer is greedy and compared, token by token, with what the same service said without drafts
    before; where it differs, transformers judges whether rounding explains it. The exit code is 1 unless at least 95 %
    of the requests are completed and all others refused with a retry time or given up by their clients, no answer is
    wrong, the verify service's memory does not grow beyond the error of its slope, and nothing is held at the end.

    \b
    Examples:
      draftwood bench soak
      draftwood bench soak --clients 8 --seconds 20 --kill-every 8 --no-compile
    """
    if values["draft"] == NO_DRAFTER:
        raise ConfigError("--draft is none: a soak has a drafter to kill", field="draft")
    names = ("clients", "seconds", "hang_ups", "kill_every_s", "seed")
    plan = Plan(**{name: values.pop(name) for name in names})
    outcome = run_stoppable(run_trial(load(prompts).texts, plan, values))
    report(outcome)
    write_json(to_json(outcome), json_path)
    raise SystemExit(1 if outcome.findings else 0)


def report(outcome: Outcome) -> None:
    """What was seen, and the verdict."""
    tally, memory = outcome.tally, outcome.memory
    drafted = tally.drafted_steps + tally.fallback_steps
    first, last = (size / MIB for size in outcome.resident_bytes)
    slope, error = (60 * value / MIB for value in (memory.per_s, memory.error))
    judged = "" if memory.is_judged else "; too short a run to judge it"
    for line in (
        f"{tally.total} requests: {tally.completed} completed with {tally.tokens} tokens, {tally.refused} refused with "
        f"a retry time, {tally.hung_up} given up by their clients, {len(tally.lost)} lost",
        f"{outcome.kills} kills of the drafter; {tally.fallback_steps} of {drafted} steps that wanted a draft had none",
        f"{len(tally.differences)} answers differ from those without drafts: {outcome.close_calls} close calls, "
        f"{len(outcome.failures)} failures",
        f"resident memory of the verify service {first:.1f} to {last:.1f} MiB, "
        f"slope {slope:.3f} ± {error:.3f} MiB per minute{judged}",
        "held at the end: " + ", ".join(f"{name} {count}" for name, count in outcome.left_over.items()),
    ):
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    for finding in outcome.findings:
        out.print(f"[red]failed:[/red] {escape(finding)}", soft_wrap=True)
    if not outcome.findings:
        out.print("[green]All held.[/green]")


def to_json(outcome: Outcome) -> dict[str, Any]:
    """The result as plain values."""
    tally = asdict(outcome.tally)
    return {
        "plan": asdict(outcome.plan),
        "total": outcome.tally.total,
        "requests": tally | {"differences": len(outcome.tally.differences)},
        "kills": outcome.kills,
        "close_calls": outcome.close_calls,
        "failures": outcome.failures,
        "memory": asdict(outcome.memory) | {"is_judged": outcome.memory.is_judged, "is_flat": outcome.memory.is_flat},
        "resident_bytes": outcome.resident_bytes,
        "left_over": outcome.left_over,
        "findings": outcome.findings,
    }

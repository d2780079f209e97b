"""Results as tables for people and as JSON for programs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from bench.figures.figures import CONFIDENCE, STAGES, Row
from bench.figures.plot import write_plot
from bench.run.experiment import Experiment, Result
from bench.run.options import write_json
from draftwood.cli import machine
from draftwood.cli.console import out

MIB = 1 << 20
INTERVAL = f"{CONFIDENCE:.0%}"  # heading of the column beside a figure


def publish(
    result: Result, table: Callable[[Sequence[Row]], Table], json_path: Path | None, plot_path: Path | None
) -> None:
    """Prints the result with its main table, and writes the files that were asked for."""
    print_report(result, table(result.rows))
    write_json(to_json(result), json_path)
    if plot_path is not None:
        write_plot(result.rows, plot_path, caption(result))


def print_report(result: Result, table: Table) -> None:
    """The main table, step times, acceptance by depth, and what the figures depend on."""
    out.print(table)
    for row in result.rows:
        if row.shadow_tokens_per_step is not None:
            out.print(
                f"{row.configuration}: {row.tokens_per_step:.2f} tokens per step with the chain; at the same positions "
                f"the tree would have given {row.shadow_tokens_per_step:.2f}",
                markup=False,
            )
    out.print(throughputs(result.rows), markup=False, highlight=False)
    out.print(stage_table(result.rows))
    drafted = [row for row in result.rows if row.acceptance_by_depth]
    if drafted:
        out.print(acceptance_table(drafted))
    out.print(caption(result), style="dim", markup=False)


def decode_table(rows: Sequence[Row]) -> Table:
    """Speed by configuration."""
    headings = ("", "tokens/s", INTERVAL, "×\nnone", INTERVAL, "tokens\n/ step", "drafted\n/ step", "steps")
    table = _table("Decoding", headings)
    for row in rows:
        table.add_row(
            row.configuration, f"{row.tokens_per_s:.1f}", interval(row.tokens_per_s_interval, ".1f"),
            optional(row.ratio_to_none, ".2f"), interval(row.ratio_to_none_interval, ".2f"),
            f"{row.tokens_per_step:.2f}", f"{row.drafted_per_step:.1f}", str(row.num_steps),
        )  # fmt: skip
    return table


def throughputs(rows: Sequence[Row]) -> str:
    """What runs of any number at once can be compared by."""
    each = (f"{row.configuration} {row.throughput:.1f} ({interval(row.throughput_interval, '.1f')})" for row in rows)
    return f"Tokens/s of wall time, prefill included: {', '.join(each)}"


def sweep_table(rows: Sequence[Row]) -> Table:
    """Speed by budget."""
    headings = ("", "nodes\n/ step", "tokens/s", INTERVAL, "×\nnone", "×\nlinear", "tokens\n/ step", "ms\n/ step")
    table = _table("Tree budgets", headings)
    for row in rows:
        table.add_row(
            row.configuration, f"{row.drafted_per_step + 1:.1f}", f"{row.tokens_per_s:.1f}",
            interval(row.tokens_per_s_interval, ".1f"), optional(row.ratio_to_none, ".2f"),
            optional(row.ratio_to_linear, ".2f"), f"{row.tokens_per_step:.2f}", f"{row.ms_per_step:.2f}",
        )  # fmt: skip
    return table


def stage_table(rows: Sequence[Row]) -> Table:
    """Step times by stage; nothing is known of transformers' stages."""
    table = _table("Milliseconds per step", ("", "step", *STAGES, "transport\np50"))
    for row in rows:
        known = any(row.stage_ms.values())
        stages = [f"{row.stage_ms[stage]:.2f}" if known else "-" for stage in STAGES]
        table.add_row(row.configuration, f"{row.ms_per_step:.2f}", *stages, optional(row.transport_p50_ms, ".2f"))
    return table


def acceptance_table(rows: Sequence[Row]) -> Table:
    """Of the drafted steps whose tree reached a depth, the share that accepted that deep."""
    table = _table("Acceptance by depth", ("depth", *(row.configuration for row in rows)))
    for depth, rates in enumerate(zip_longest(*(row.acceptance_by_depth for row in rows)), start=1):
        table.add_row(str(depth), *(optional(rate, ".0%") for rate in rates))
    return table


def _table(title: str, headings: Sequence[str]) -> Table:
    """Names to the left, numbers to the right; narrow enough for 80 columns."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return table


def interval(bounds: tuple[float, float] | None, form: str) -> str:
    """Both ends, or a dash where there is none: of one round, or against itself."""
    return "-" if bounds is None or bounds[0] == bounds[1] else f"{bounds[0]:{form}}–{bounds[1]:{form}}"


def optional(value: float | None, form: str) -> str:
    """A value, or a dash."""
    return "-" if value is None else f"{value:{form}}"


def caption(result: Result) -> str:
    """What the figures depend on, in words."""
    experiment, target = result.experiment, result.target
    sampling = experiment.sampling
    way = "greedy" if sampling.is_greedy else f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}"
    memory = ", ".join(f"{name} {peak / MIB:.0f}" for name, peak in result.peak_memory.items())
    services = [peak for name, peak in result.peak_memory.items() if name != "transformers"]
    total = f"{sum(services) / MIB:.0f} MiB{' together' if len(services) > 1 else ''}"
    time = "first token to last, without prefill" if experiment.concurrency == 1 else "wall time with prefill"
    return (
        f"{target.model_id} with {target.draft_model_id or 'no drafter'}, {target.dtype}, {machine.processor()}, "
        f"{machine.num_cores()} cores; {len(experiment.prompts.texts)} prompts of {experiment.prompts.name}, {way}, "
        f"answers of {mean_length(result):.0f} tokens (limit {experiment.max_new}), {experiment.concurrency} at once; "
        f"medians of {experiment.rounds} interleaved rounds after warm-up, {CONFIDENCE:.0%} bootstrap intervals; "
        f"ratios within rounds; tokens/s: {time}. "
        f"Peak memory {total} ({memory})."
    )


def mean_length(result: Result) -> float:
    """Mean answer length in tokens over the configurations."""
    num_prompts = len(result.experiment.prompts.texts)
    return sum(row.num_tokens / num_prompts + 1 for row in result.rows) / len(result.rows)


def to_json(result: Result) -> dict[str, Any]:
    """Results as plain values; `write_json` adds the machine."""
    return {
        "command": shlex.join(["draftwood", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": machine.versions(),
        "target": asdict(result.target),
        "experiment": experiment_to_json(result.experiment) | {"mean_answer_tokens": round(mean_length(result), 1)},
        "peak_memory_bytes": result.peak_memory,
        "results": [asdict(row) for row in result.rows],
    }


def experiment_to_json(experiment: Experiment) -> dict[str, Any]:
    """Settings of the measurement."""
    return {
        "prompts": experiment.prompts.name,
        "num_prompts": len(experiment.prompts.texts),
        "prompts_sha256": experiment.prompts.digest,
        "rounds": experiment.rounds,
        "max_new_tokens": experiment.max_new,
        "concurrency": experiment.concurrency,
        "temperature": experiment.sampling.temperature,
        "top_p": experiment.sampling.top_p,
        "seed": experiment.sampling.seed,
        "services": experiment.stack_values if experiment.verify is None else experiment.verify,
    }

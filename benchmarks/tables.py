"""Writes the result tables of README.md from the files in benchmarks/results.

    python benchmarks/tables.py

Each `*.json` there was written by `draftwood bench decode --json` or `draftwood bench sweep --json`, and gives a table
in the order of the file names. Files in folders below are kept and not shown. The region between the two comments is
this script's own: a test compares it with what the script writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import docs.region

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = Path(__file__).parent / "results"
BEGIN, END = docs.region.markers("results")
NO_RESULTS = "No results are committed yet; `make bench` measures your machine."

COLUMNS = ("", "tokens/s", "speed-up", "tokens per step", "drafted per step", "ms per step")
NAMES = {"none": "no drafts", "dflash": "chain", "ddtree": "tree", "transformers": "transformers `generate`"}


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The results of decoding in the folder, by file name. Raises ValueError for a file of another kind."""
    found: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if not {"experiment", "results", "target"} <= result.keys():
            raise ValueError(f"{path} is no result of `draftwood bench decode` or `draftwood bench sweep`")
        found.append(result)
    return found


def region(results: Iterable[dict[str, Any]]) -> str:
    """The text between the two comments."""
    return "\n\n".join(f"{table(result)}\n\n{caption(result)}" for result in results) or NO_RESULTS


def table(result: dict[str, Any]) -> str:
    """One result as a Markdown table."""
    lines = [_line(COLUMNS), _line(["---", *["---:"] * (len(COLUMNS) - 1)])]
    lines += [_line(_cells(row)) for row in result["results"]]
    return "\n".join(lines)


def caption(result: dict[str, Any]) -> str:
    """What the figures depend on, and the command that gave them."""
    experiment, target, versions = result["experiment"], result["target"], result["versions"]
    alone = experiment["concurrency"] == 1
    facts = [
        f"`{target['model_id']}` with `{target['draft_model_id'] or 'no drafter'}`, {target['dtype']}",
        f"{result['processor']}, {result['cores']} cores",
        f"batch {experiment['concurrency']}, {_way(experiment)}",
        f"{experiment['num_prompts']} prompts of {experiment['prompts']}",
        f"answers of {experiment['mean_answer_tokens']:.0f} tokens in the mean (limit {experiment['max_new_tokens']})",
        "first token to last, without prefill" if alone else "wall time with prefill",
        f"medians of {experiment['rounds']} interleaved rounds, in brackets 95 % bootstrap intervals",
        f"torch {versions['torch']}, transformers {versions['transformers']}",
        f"commit {result['commit'][:10] or 'unknown'}{' with changes' if result['commit'].endswith('+') else ''}",
    ]
    return f"<sub>{'; '.join(facts)}. `{result['command']}`</sub>"


def rewritten(text: str, inner: str) -> str:
    """The text with the region replaced. Raises ValueError where its comments are not there once and in order."""
    return docs.region.rewritten(text, "results", inner)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        _name(row["configuration"]),
        f"{row['tokens_per_s']:.1f} {_interval(row['tokens_per_s_interval'], '.1f')}".strip(),
        f"{_number(row['ratio_to_none'], '.2f', '×')} {_interval(row['ratio_to_none_interval'], '.2f')}".strip(),
        f"{row['tokens_per_step']:.2f}",
        f"{row['drafted_per_step']:.1f}" if row["drafted_per_step"] else "–",
        f"{row['ms_per_step']:.2f}",
    ]


def _name(configuration: str) -> str:
    algorithm, _, size = configuration.partition(" ")
    return f"{NAMES.get(algorithm, algorithm)}, {size} nodes" if size else NAMES.get(algorithm, algorithm)


def _number(value: float | None, form: str, unit: str) -> str:
    return "–" if value is None else f"{value:{form}}{unit}"


def _interval(bounds: list[float] | None, form: str) -> str:
    """Both ends in brackets; nothing where they are the same, as in a comparison with itself."""
    if bounds is None or f"{bounds[0]:{form}}" == f"{bounds[1]:{form}}":
        return ""
    return f"[{bounds[0]:{form}}–{bounds[1]:{form}}]"


def _way(experiment: dict[str, Any]) -> str:
    if experiment["temperature"] == 0:
        return "greedy"
    return f"temperature {experiment['temperature']:g}, top-p {experiment['top_p']:g}"


def main() -> None:
    """Rewrites README.md."""
    text = README.read_text(encoding="utf-8")
    README.write_text(rewritten(text, region(read_results(RESULTS))), encoding="utf-8")


if __name__ == "__main__":
    main()

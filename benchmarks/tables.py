"""Writes the figures and the plot of README.md and docs/results.md from the files in benchmarks/results.

    python -m benchmarks.tables

Each region between two comments is this script's own: a test compares them with what the script writes. Results of
decoding were written by `draftwood bench decode --json` or `draftwood bench sweep --json`, the others by `draftwood
bench prefill --json` and `draftwood bench soak --json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import plot
from docs.region import rewritten

ROOT = Path(__file__).parent.parent
README, PAGE = ROOT / "README.md", ROOT / "docs" / "results.md"
PICTURE = ROOT / "docs" / "images" / "results.svg"
RESULTS = Path(__file__).parent / "results"
HEADLINE = "decode-xeon-2cores-bfloat16"
SWEEP = "sweep-zen-2cores-float32"  # what the plot shows
MIB = 1 << 20

NAMES = {"none": "no drafts", "dflash": "chain", "ddtree": "tree", "transformers": "transformers `generate`"}

Result = dict[str, Any]


def read(name: str) -> Result:
    """One file below benchmarks/results, named without its ending."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def read_decoding(folder: Path) -> list[Result]:
    """The results of decoding in the folder, by file name. Raises ValueError for a file of another kind."""
    found: list[Result] = []
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if not {"experiment", "results", "target"} <= result.keys():
            raise ValueError(f"{path} is no result of `draftwood bench decode` or `draftwood bench sweep`")
        found.append(result)
    return found


def headline() -> str:
    """README's table: one measurement, the columns that a newcomer needs."""
    result = read(HEADLINE)
    experiment = result["experiment"]
    columns = ("", "tokens/s", "speed-up", "tokens per step")
    table = markdown(columns, (_cells(row)[:4] for row in result["results"]))
    return (
        f"{table}\n\n<sub>Embedded pair, {result['target']['dtype']}, {_place(result)}; one request at a time, "
        f"{_way(experiment)}, {experiment['num_prompts']} held-out prompts; medians of {experiment['rounds']} rounds, "
        "in brackets 95 % bootstrap intervals.</sub>"
    )


def plot_caption() -> str:
    """What README's plot shows: another measurement than the table's."""
    result = read(SWEEP)
    experiment = result["experiment"]
    return (
        f"<sub>The same pair, {result['target']['dtype']}, {_place(result)}; {experiment['num_prompts']} prompts, "
        f"{experiment['rounds']} rounds. Speed-ups are over no drafts on that machine.</sub>"
    )


def limits() -> str:
    """README's list of where trees do not win."""
    sweep, gpu, step = read(SWEEP), read("h200/decode_embedded_bfloat16"), read("h200/step_Qwen3.6-27B")
    largest = max((row for row in sweep["results"] if row["configuration"].startswith("ddtree")), key=_size)
    toy = min(gpu["results"], key=lambda row: row["ratio_to_none"])
    ms = {(row["batch"], row["nodes"]): row["step"] for row in step["rows"]}
    batch, nodes = max(ms)
    few, first, all_prompts = read("acceptance/heldout_48-float32"), _tree(sweep, 15), sweep["experiment"]
    lines = (
        f"**Trees that are too large.** With {_size(largest)} nodes on two CPU cores the embedded pair gives "
        f"{largest['tokens_per_step']:.2f} tokens per step and is still slower than without drafts "
        f"({largest['ratio_to_none']:.2f}×).",
        f"**Targets that are too small for the device.** On an H200 the embedded pair with trees of {_size(toy)} nodes "
        f"reaches {toy['ratio_to_none']:.2f}× of its speed without drafts.",
        f"**Large batches.** A step of {step['shape']}'s shape with {nodes} nodes per request takes "
        f"{ms[1, nodes] / ms[1, 1]:.2f} times as long as one without drafts for one request, and "
        f"{ms[batch, nodes] / ms[batch, 1]:.2f} times for {batch}.",
        f"**Text that the drafter cannot guess.** The speed-up follows the acceptance: trees of 15 nodes give "
        f"{first['tokens_per_step']:.2f} tokens per step on the first {all_prompts['num_prompts']} held-out prompts "
        f"and {_tree(few, 15)['tokens_per_step']:.2f} on all {few['experiment']['num_prompts']}.",
    )
    return "\n".join(f"- {line}" for line in lines)


def decoding(results: Iterable[Result]) -> str:
    """A full table for each result of decoding."""
    columns = ("", "tokens/s", "speed-up", "tokens per step", "drafted per step", "ms per step")
    return "\n\n".join(
        f"{markdown(columns, map(_cells, result['results']))}\n\n{caption(result)}" for result in results
    )


def acceptance() -> str:
    """Tokens per step by prompts, block and tree, where speed was not the question."""
    rows: list[Sequence[str]] = []
    for name, drafter in (
        ("heldout_48-float32", "blocks of 16"),
        ("draft-block-16-float32", "blocks of 16"),
        ("draft-block-8-float32", "blocks of 8"),
    ):
        result = read(f"acceptance/{name}")
        prompts = str(result["experiment"]["num_prompts"])
        rows += [(_cells(row)[0], drafter, prompts, *_cells(row)[3:5]) for row in result["results"]]
    return markdown(("", "drafter", "prompts", "tokens per step", "drafted per step"), rows)


def throughput() -> str:
    """One request and several at once, over wall time."""
    rows: list[Sequence[str]] = []
    for path in sorted((RESULTS / "throughput").glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        for row in result["results"]:
            speed = f"{row['throughput']:.1f} {_interval(row['throughput_interval'], '.1f')}"
            rows.append((_name(row["configuration"]), str(result["experiment"]["concurrency"]), speed))
    return markdown(("", "requests at once", "tokens/s of wall time"), rows)


def prefill() -> str:
    """What a long prompt costs the answers beside it."""
    result = read("prefill/zen-2cores-float32")
    rows = [
        (
            _name(name),
            f"{1e3 * median((r['before_s'] + r['after_s']) / 2 for r in rounds):.2f}",
            f"{1e3 * median(r['beside_s'] for r in rounds):.2f}",
            f"{median(r['ratio'] for r in rounds):.2f}",
            f"{median(r['prefill_s'] for r in rounds):.1f}",
        )
        for name, rounds in result["rounds"].items()
    ]
    columns = ("", "ms per token alone", "ms per token beside the prompt", "ratio", "prompt, s")
    return (
        f"{markdown(columns, rows)}\n\n<sub>{result['running']} answers, a prompt of {result['length']} tokens; "
        f"{_place(result)}; {_commit(result)}.</sub>"
    )


def soak() -> str:
    """Load, hang-ups and kills of the drafter, run by run; also those runs that found something."""
    rows: list[Sequence[str]] = []
    for path in sorted((RESULTS / "soak").glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        requests, memory = result["requests"], result["memory"]
        slope, error = (60 * memory[name] / MIB for name in ("per_s", "error"))
        answers = (result["total"], requests["completed"], requests["hung_up"], len(requests["lost"]))
        rows.append(
            (
                f"[{path.stem}](../{path.relative_to(ROOT)})",
                f"{result['plan']['seconds']:.0f}",
                *map(str, (*answers, result["kills"], len(result["failures"]))),
                f"{slope:.1f} ± {error:.1f}",
                "; ".join(result["findings"]) or "none",
            )
        )
    columns = ("run", "s", "requests", "completed", "given up", "lost", "kills", "wrong", "MiB per minute", "findings")
    return markdown(columns, rows)


def caption(result: Result) -> str:
    """What the figures depend on, and the command that gave them."""
    experiment, target, versions = result["experiment"], result["target"], result["versions"]
    alone = experiment["concurrency"] == 1
    facts = [
        f"`{target['model_id']}` with `{target['draft_model_id'] or 'no drafter'}`, {target['dtype']}",
        _place(result),
        f"batch {experiment['concurrency']}, {_way(experiment)}",
        f"{experiment['num_prompts']} prompts of {experiment['prompts']}",
        f"answers of {experiment['mean_answer_tokens']:.0f} tokens in the mean (limit {experiment['max_new_tokens']})",
        "first token to last, without prefill" if alone else "wall time with prefill",
        f"medians of {experiment['rounds']} interleaved rounds, in brackets 95 % bootstrap intervals",
        f"torch {versions['torch']}, transformers {versions['transformers']}",
        _commit(result),
    ]
    return f"<sub>{'; '.join(facts)}. `{result['command']}`</sub>"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table: names to the left in the first column, figures to the right in the others."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cells(row: dict[str, Any]) -> list[str]:
    ratio = row["ratio_to_none"]
    return [
        _name(row["configuration"]),
        f"{row['tokens_per_s']:.1f} {_interval(row['tokens_per_s_interval'], '.1f')}".strip(),
        "–" if ratio is None else f"{ratio:.2f}× {_interval(row['ratio_to_none_interval'], '.2f')}".strip(),
        f"{row['tokens_per_step']:.2f}",
        f"{row['drafted_per_step']:.1f}" if row["drafted_per_step"] else "–",
        f"{row['ms_per_step']:.2f}",
    ]


def _name(configuration: str) -> str:
    algorithm, _, size = configuration.partition(" ")
    return f"{NAMES.get(algorithm, algorithm)}, {size} nodes" if size else NAMES.get(algorithm, algorithm)


def _size(row: dict[str, Any]) -> int:
    return int(row["configuration"].partition(" ")[2] or 0)


def _tree(result: Result, size: int) -> dict[str, Any]:
    return next(row for row in result["results"] if row["configuration"] == f"ddtree {size}")


def _interval(bounds: Sequence[float] | None, form: str) -> str:
    """Both ends in brackets; nothing where they are the same, as in a comparison with itself."""
    if bounds is None or f"{bounds[0]:{form}}" == f"{bounds[1]:{form}}":
        return ""
    return f"[{bounds[0]:{form}}–{bounds[1]:{form}}]"


def _way(experiment: dict[str, Any]) -> str:
    if experiment["temperature"] == 0:
        return "greedy"
    return f"temperature {experiment['temperature']:g}, top-p {experiment['top_p']:g}"


def _place(result: Result) -> str:
    return f"{result['processor']}, {result['cores']} cores"


def _commit(result: Result) -> str:
    return f"commit {result['commit'][:10] or 'unknown'}{' with changes' if result['commit'].endswith('+') else ''}"


REGIONS: dict[Path, dict[str, Callable[[], str]]] = {
    README: {"results": headline, "plot": plot_caption, "limits": limits},
    PAGE: {
        "decoding": lambda: decoding(read_decoding(RESULTS)),
        "gpu-decoding": lambda: decoding([read("h200/decode_embedded_bfloat16")]),
        "acceptance": acceptance,
        "throughput": throughput,
        "prefill": prefill,
        "soak": soak,
    },
}


def write(page: Path, text: str) -> str:
    """The page's text with its regions replaced. Raises ValueError where their comments are not there."""
    for name, region in REGIONS[page].items():
        text = rewritten(text, name, region())
    return text


if __name__ == "__main__":
    for each in REGIONS:
        each.write_text(write(each, each.read_text(encoding="utf-8")), encoding="utf-8")
    plot.write(read(SWEEP)["results"], PICTURE)

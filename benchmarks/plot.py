"""The plot of README.md: what trees and chains give and cost by their size. `python -m benchmarks.tables` writes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

INK = "#7d8590"  # readable on light and on dark pages; the background is transparent
SERIES = (("ddtree", "tree", "#22a055", "o"), ("dflash", "chain", "#3b82f6", "s"))


def write(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Rows of a sweep as an SVG file, the same bytes each time."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: Any = {"svg.hashsalt": "draftwood", "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK,
             "xtick.color": INK, "ytick.color": INK, "font.size": 10, "axes.spines.top": False,
             "axes.spines.right": False}  # fmt: skip
    with mpl.rc_context(style):
        figure: Any = Figure(figsize=(8, 3), layout="constrained")
        FigureCanvasSVG(figure)
        per_step, speed_up = figure.subplots(1, 2)
        _draw(per_step, rows, "tokens_per_step", None)
        _draw(speed_up, rows, "ratio_to_none", "ratio_to_none_interval")
        per_step.set_title("tokens per step", fontsize=10)
        speed_up.set_title("speed-up", fontsize=10)
        per_step.legend(frameon=False, labelcolor=INK)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n", encoding="utf-8")


def _draw(axes: Any, rows: Sequence[dict[str, Any]], value: str, interval: str | None) -> None:
    """One line for each way to draft, over its nodes; plain decoding is the dashed line at 1."""
    for algorithm, label, color, marker in SERIES:
        own = [row for row in rows if row["configuration"].startswith(algorithm)]
        sizes = [int(row["configuration"].split()[1]) for row in own]
        values = [row[value] for row in own]
        axes.plot(sizes, values, color=color, marker=marker, label=label)
        if interval is not None:
            low, high = ([abs(row[value] - row[interval][end]) for row in own] for end in (0, 1))
            axes.errorbar(sizes, values, yerr=[low, high], color=color, capsize=3, fmt="none")
    axes.axhline(1, color=INK, linestyle="--", linewidth=1, label="no drafts")
    axes.set_xscale("log", base=2)
    axes.set_xticks([7, 15, 31, 63], ["7", "15", "31", "63"])
    axes.minorticks_off()
    axes.set_xlabel("draft tokens per step")
    axes.set_ylim(bottom=0)

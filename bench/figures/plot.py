"""A picture of results: tokens per second and tokens per step by configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.figures.figures import Row
from draftwood.errors import ConfigError


def write_plot(rows: Sequence[Row], path: Path, caption: str) -> None:
    """Writes a PNG file. Raises ConfigError where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib", field="plot") from error
    figure: Any = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    speed, per_step = figure.subplots(1, 2)
    names, values = [row.configuration for row in rows], [row.tokens_per_s for row in rows]
    low = [row.tokens_per_s - row.tokens_per_s_interval[0] for row in rows]
    high = [row.tokens_per_s_interval[1] - row.tokens_per_s for row in rows]
    speed.bar(names, values, yerr=[low, high], capsize=3, color="#3b6e8f")
    speed.set_ylabel("tokens/s")
    per_step.bar(names, [row.tokens_per_step for row in rows], color="#7a9e5f")
    per_step.set_ylabel("tokens per step")
    for axes in (speed, per_step):
        axes.tick_params(axis="x", rotation=45)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(_wrapped(caption), fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _wrapped(text: str) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, 150))

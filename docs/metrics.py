"""Writes the table of docs/telemetry.md from the definitions of the metrics.

    python -m docs.metrics

The region between the two comments is this script's own: a test compares it with what the script writes.
"""

from __future__ import annotations

from pathlib import Path

from docs.region import rewritten
from draftwood.telemetry.metrics import SERVICES, Metric, ServiceName, metrics_of

PAGE = Path(__file__).parent / "telemetry.md"
TITLES: dict[ServiceName, str] = {"gateway": "Gateway", "verify": "Verify service", "draft": "Draft service"}


def region() -> str:
    """The text between the two comments."""
    return "\n\n".join(_table(service) for service in SERVICES)


def _table(service: ServiceName) -> str:
    head = [f"**{TITLES[service]}**", "", "| metric | kind | labels | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *(_row(metric) for metric in metrics_of(service))])


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels) or "–"
    buckets = (
        f" {len(metric.buckets)} buckets, {metric.buckets[0]:g} to {metric.buckets[-1]:g}." if metric.buckets else ""
    )
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help}{buckets} |"


def write(text: str) -> str:
    """`text` with the region replaced."""
    return rewritten(text, "metrics", region())


if __name__ == "__main__":
    PAGE.write_text(write(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

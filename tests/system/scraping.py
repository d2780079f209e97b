"""Reads what a service exports, as Prometheus does."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(text: str) -> Samples:
    """Values by series name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(port: int) -> Samples:
    """What the endpoint says now."""
    with httpx.Client(trust_env=False) as client:
        return parse(client.get(f"http://127.0.0.1:{port}/metrics").raise_for_status().text)


def value(samples: Samples, name: str, **labels: str) -> float:
    """One series' value."""
    return samples[name, frozenset(labels.items())]

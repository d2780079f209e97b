"""The dashboard and the alerts ask for metrics that exist, by labels that they have, in words that Prometheus knows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from draftwood.telemetry.metrics import METRICS, Metric

DEPLOY = Path(__file__).parents[2] / "deploy"
BY_NAME = {metric.name: metric for metric in METRICS}
FOREIGN = {"up", "process_resident_memory_bytes", "process_cpu_seconds_total"}  # every target has these
TARGET_LABELS = {"job", "instance", "le"}
INTERVAL = "$__rate_interval"


def dashboard() -> dict[str, Any]:
    return json.loads((DEPLOY / "grafana" / "draftwood.json").read_text(encoding="utf-8"))


def rules() -> list[dict[str, Any]]:
    groups: Any = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text(encoding="utf-8"))
    return [rule for group in groups["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    """Where it stands, and the expression."""
    for panel in panels():
        for target in panel["targets"]:
            yield f"panel {panel['title']}", target["expr"].replace(INTERVAL, "1m")
    for rule in rules():
        yield f"alert {rule['alert']}", rule["expr"]


EXPRESSIONS = list(expressions())


def metric_of(series: str) -> Metric | None:
    """The definition behind a series: histograms have three."""
    if series in BY_NAME:
        return BY_NAME[series] if BY_NAME[series].kind != "histogram" else None
    name, _, part = series.rpartition("_")
    metric = BY_NAME.get(name)
    return metric if metric is not None and metric.kind == "histogram" and part in ("bucket", "sum", "count") else None


def selectors(expression: Any) -> Iterator[tuple[promql_parser.VectorSelector, set[str]]]:
    """Every series that is asked for, with the labels that the sums around it keep."""
    match expression:
        case promql_parser.VectorSelector():
            yield expression, set()
        case promql_parser.MatrixSelector():
            yield from selectors(expression.vector_selector)
        case promql_parser.AggregateExpr():
            kept = set(expression.modifier.labels) if expression.modifier is not None else set()
            for selector, labels in selectors(expression.expr):
                yield selector, labels | kept
        case promql_parser.BinaryExpr():
            yield from selectors(expression.lhs)
            yield from selectors(expression.rhs)
        case promql_parser.Call():
            for argument in expression.args:
                yield from selectors(argument)
        case promql_parser.ParenExpr():
            yield from selectors(expression.expr)
        case _:
            assert isinstance(expression, promql_parser.NumberLiteral), type(expression)


@pytest.mark.parametrize(("place", "text"), EXPRESSIONS, ids=[place for place, _ in EXPRESSIONS])
def test_what_is_asked_for_exists(place: str, text: str) -> None:
    asked = list(selectors(promql_parser.parse(text)))
    assert asked
    for selector, kept in asked:
        name = selector.name
        used = kept | {matcher.name for matcher in selector.matchers.matchers}
        if name in FOREIGN:
            assert used <= TARGET_LABELS
            continue
        metric = metric_of(str(name))
        assert metric is not None, f"{place}: nothing exports {name}"
        assert used <= {*metric.labels, *TARGET_LABELS}, place
        if metric.kind == "counter" or metric.kind == "histogram":
            assert "rate(" in text or "increase(" in text, f"{place}: {name} only grows"


def test_every_metric_is_looked_at() -> None:
    """What nobody looks at need not be measured."""
    seen = {
        metric.name
        for _, text in EXPRESSIONS
        for selector, _ in selectors(promql_parser.parse(text))
        if (metric := metric_of(str(selector.name))) is not None
    }
    assert set(BY_NAME) - seen == set(), "give it a place in deploy/grafana/draftwood.json"


def test_panels_do_not_overlap_and_have_the_provisioned_source() -> None:
    sources: Any = yaml.safe_load(
        (DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yaml").read_text(encoding="utf-8")
    )
    uid = sources["datasources"][0]["uid"]
    cells: set[tuple[int, int]] = set()
    board = dashboard()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in board["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not own & cells, panel["title"]
        cells |= own
    assert {target["datasource"]["uid"] for panel in panels() for target in panel["targets"]} == {uid}


def test_alerts_say_what_is_wrong() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        promql_parser.parse_duration(rule["for"])


def test_a_service_that_is_to_have_no_drafter_does_not_lack_one() -> None:
    (rule,) = (rule for rule in rules() if rule["alert"] == "DraftwoodDrafterAbsent")
    ((selector, kept),) = selectors(promql_parser.parse(rule["expr"]))
    (matcher,) = selector.matchers.matchers
    assert (matcher.name, matcher.value, kept) == ("state", "ready|none", {"state"})


def test_prometheus_scrapes_three_services_and_reads_the_alerts() -> None:
    config: Any = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text(encoding="utf-8"))
    assert config["rule_files"] == ["alerts.yaml"]
    jobs = {job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]}
    assert jobs == {
        "draftwood-gateway": ["gateway:9464"],
        "draftwood-verify": ["verify:9465"],
        "draftwood-draft": ["draft:9466"],
    }

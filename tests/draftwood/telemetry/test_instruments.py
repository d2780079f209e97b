"""Definitions of metrics, and the endpoint that Prometheus reads."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import httpx
import pytest

from draftwood.errors import ConfigError
from draftwood.telemetry import endpoint, metrics
from draftwood.telemetry.instruments import Instruments
from draftwood.telemetry.metrics import METRICS, SERVICES
from tests.system.processes import free_port
from tests.system.scraping import parse, scrape, value


def test_names_are_what_prometheus_wants() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"draftwood_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.help.endswith(".")
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.service in SERVICES
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_buckets_are_fine_where_tokens_take_milliseconds() -> None:
    assert sum(0.001 <= bound <= 0.01 for bound in metrics.TIME_PER_OUTPUT_TOKEN.buckets) >= 8
    assert metrics.TRANSPORT_SECONDS.buckets[0] == 50e-6
    assert metrics.TRANSPORT_SECONDS.buckets[-1] == 50e-3


def test_readings_are_taken_when_asked_for() -> None:
    instruments, count = Instruments("verify"), 0
    instruments.read(metrics.STEPS, lambda: count)
    instruments.read(metrics.FALLBACKS, lambda: {"absent": count, "busy": 2 * count})
    instruments.histogram(metrics.STAGE_SECONDS).labels("draft").observe(0.0009)
    for count in (0, 7):
        samples = parse(instruments.exposition())
        assert value(samples, "draftwood_steps_total") == count
        assert value(samples, "draftwood_fallbacks_total", cause="busy") == 2 * count
    assert value(samples, "draftwood_stage_seconds_bucket", stage="draft", le="0.001") == 1
    assert value(samples, "draftwood_stage_seconds_bucket", stage="draft", le="0.0005") == 0
    assert not any(name.endswith("_created") for name, _ in samples)


def test_endpoint_answers_until_it_is_closed() -> None:
    instruments, port = Instruments("draft"), free_port()
    instruments.read(metrics.DRAFT_STREAMS, lambda: 3)
    instruments.serve("127.0.0.1", port)
    samples = scrape(port)
    assert value(samples, "draftwood_draft_streams") == 3
    assert any(name == "draftwood_build_info" and ("service", "draft") in labels for name, labels in samples)
    assert any(name == "process_resident_memory_bytes" for name, _ in samples)
    instruments.close()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--metrics-port {port}: cannot listen on 127.0.0.1:{port}") as caught:
            Instruments("gateway").serve("127.0.0.1", port)
    assert caught.value.field == "metrics_port"


@pytest.fixture
def port() -> Iterator[int]:
    instruments, port = Instruments("draft"), free_port()
    instruments.serve("127.0.0.1", port)
    yield port
    instruments.close()


@pytest.mark.parametrize("path", ["/", "/metrics/", "/metric", "/favicon.ico", "/health"])
def test_other_paths_are_not_found(port: int, path: str) -> None:
    response = httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False)
    assert response.status_code == 404
    assert "/metrics" in response.text
    assert httpx.get(f"http://127.0.0.1:{port}/metrics?name[]=x", trust_env=False).status_code == 200


@pytest.mark.parametrize("begun", [b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: x\r\n"])
def test_a_connection_that_asks_nothing_is_closed(
    port: int, begun: bytes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(endpoint.QuietHandler, "timeout", 0.05)
    with socket.create_connection(("127.0.0.1", port), timeout=30) as half_open:
        half_open.sendall(begun)
        assert half_open.recv(1) == b""
    assert "Traceback" not in capfd.readouterr().err

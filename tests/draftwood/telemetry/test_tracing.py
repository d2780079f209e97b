"""Spans arrive at a collector, and one that is gone holds nothing up."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from draftwood.config import DraftConfig
from draftwood.telemetry.tracing import Tracing
from tests.system.processes import free_port


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.requests: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def Export(self, request: Any, context: Any) -> Any:
        self.requests.put(request)
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, int]]:
    server, collector = grpc.server(ThreadPoolExecutor(1)), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collector, port
    server.stop(0).wait()


def test_a_span_arrives_with_its_resource(collector: tuple[Collector, int]) -> None:
    kept, port = collector
    tracing = Tracing.start(DraftConfig(otlp_endpoint=f"http://127.0.0.1:{port}"), "draft")
    parent = f"00-{'1' * 32}-{'2' * 16}-01"
    tracing.span("draftwood.v1.DraftService/Draft", parent, is_server=True, attributes={"draftwood.batch": 3}).end()
    tracing.close()
    (batch,) = kept.requests.get(timeout=20).resource_spans
    (span,) = batch.scope_spans[0].spans
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == (
        "draftwood.v1.DraftService/Draft",
        "1" * 32,
        "2" * 16,
    )
    assert {entry.key: entry.value.int_value for entry in span.attributes} == {"draftwood.batch": 3}
    resource = {entry.key: entry.value.string_value for entry in batch.resource.attributes}
    assert resource["service.name"] == "draftwood-draft"
    assert resource["service.namespace"] == "draftwood"


def test_a_collector_that_is_gone_holds_up_no_stop(caplog: pytest.LogCaptureFixture) -> None:
    tracing = Tracing.start(DraftConfig(otlp_endpoint=f"http://127.0.0.1:{free_port()}"), "draft")
    tracing.span("step", "").end()
    tracing.close()
    assert "Failed to export" in caplog.text

"""Spans: where they go, and how a trace is carried from one service to the next.

Imported only where traces are asked for, because OpenTelemetry's SDK takes its time to load. Who is traced is decided
where a trace begins, by `--trace-ratio`; everybody after that follows the `traceparent` (W3C Trace Context) that came
with the request.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Self

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, Span, SpanKind, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from draftwood import __version__
from draftwood.config import ServiceConfig
from draftwood.telemetry import MAX_TRACEPARENT
from draftwood.telemetry.span_file import SpanFile

EXPORT_TIMEOUT_S = 2.0  # a collector that is gone must not hold up a stop
MAX_CONTEXTS = 4096  # requests whose context is kept parsed
Attribute = str | bool | int | float | list[str]

_propagator = TraceContextTextMapPropagator()


class Tracing:
    """One service's tracer. Spans are handed over as they end, and exported by a thread of their own."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self.tracer: Tracer = provider.get_tracer("draftwood", __version__)

    @classmethod
    def start(cls, config: ServiceConfig, service: str) -> Self:
        """Exports to where the configuration says. Raises ConfigError where the file cannot be written."""
        resource = Resource.create(
            {"service.namespace": "draftwood", "service.name": f"draftwood-{service}", "service.version": __version__}
        )
        provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.trace_ratio)), resource=resource, shutdown_on_exit=False
        )
        for exporter in _exporters(config):
            provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    def span(
        self,
        name: str,
        parent: str | Span,
        *,
        is_server: bool = False,
        is_client: bool = False,
        start_ns: int | None = None,
        links: tuple[str, ...] = (),
        attributes: Mapping[str, Attribute] | None = None,
    ) -> Span:
        """Begins a span below a `traceparent` or another span; without one, a trace."""
        context = trace.set_span_in_context(parent) if isinstance(parent, Span) else context_of(parent)
        kind = SpanKind.SERVER if is_server else SpanKind.CLIENT if is_client else SpanKind.INTERNAL
        linked = [Link(trace.get_current_span(context_of(link)).get_span_context()) for link in links]
        return self.tracer.start_span(
            name, context, kind=kind, start_time=start_ns, links=linked, attributes=attributes
        )

    def close(self) -> None:
        """Exports what is left, and ends the exporters."""
        self._provider.shutdown()


def _exporters(config: ServiceConfig) -> list[SpanExporter]:
    exporters: list[SpanExporter] = []
    if config.otlp_endpoint:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        exporters.append(OTLPSpanExporter(endpoint=config.otlp_endpoint, timeout=EXPORT_TIMEOUT_S))
    if config.trace_file:
        exporters.append(SpanFile(config.trace_file))
    return exporters


def context_of(traceparent: str) -> Context:
    """The context that a `traceparent` describes; an empty one where it is empty or malformed."""
    return _parsed(traceparent if len(traceparent) <= MAX_TRACEPARENT else "")


@functools.lru_cache(MAX_CONTEXTS)
def _parsed(traceparent: str) -> Context:
    return _propagator.extract({"traceparent": traceparent}, Context())


def traceparent_of(span: Span) -> str:
    """What whoever works for the span is told, sampled or not."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier.get("traceparent", "")


def is_sampled(span: Span) -> bool:
    """Whether the span, and what hangs on it, will be exported."""
    return span.get_span_context().trace_flags.sampled

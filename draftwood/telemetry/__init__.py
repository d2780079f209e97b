"""Metrics and traces of the services: what is measured, where it is read, how a trace goes from one to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftwood.config import ServiceConfig

if TYPE_CHECKING:
    from draftwood.telemetry.tracing import Tracing

MAX_TRACEPARENT = 256  # characters; today's have 55, and a longer text is none


def start_tracing(config: ServiceConfig, service: str) -> Tracing | None:
    """The service's tracer where the configuration asks for one: OpenTelemetry is loaded only where it is wanted.
    Raises ConfigError."""
    if not config.is_traced:
        return None
    from draftwood.telemetry.tracing import Tracing

    return Tracing.start(config, service)

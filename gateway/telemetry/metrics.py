"""What the gateway measures: each HTTP request from its arrival to the last byte of its answer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwood.config import GatewayConfig
from draftwood.errors import DraftwoodError
from draftwood.telemetry import metrics, start_tracing
from draftwood.telemetry.instruments import Instruments
from gateway.api.error_object import CLIENT_CLOSED_REQUEST
from gateway.generation.hooks import GenerationHooks
from gateway.generation.outcome import Outcome
from gateway.generation.plan import Plan

if TYPE_CHECKING:
    from draftwood.telemetry.tracing import Tracing
    from gateway.telemetry.request_span import RequestSpan

ROUTES = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/version"})
GENERATING = frozenset({"/v1/chat/completions", "/v1/completions"})
MODELS_PREFIX = "/v1/models/"
OTHER = "other"  # paths come from clients and must not become labels


def route_of(path: str) -> str:
    """The route that a path belongs to, as a label."""
    return path if path in ROUTES else f"{MODELS_PREFIX}{{name}}" if path.startswith(MODELS_PREFIX) else OTHER


class Telemetry:
    """The gateway's metrics and spans."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        self.tracing = tracing
        self.instruments = Instruments("gateway")
        self.num_open = self.num_streams = 0
        self.requests = self.instruments.counter(metrics.HTTP_REQUESTS)
        self.seconds = self.instruments.histogram(metrics.HTTP_SECONDS)
        self.first_token = self.instruments.histogram(metrics.HTTP_FIRST_TOKEN)
        self.hang_ups = self.instruments.counter(metrics.HANG_UPS)
        self.input_tokens = self.instruments.counter(metrics.INPUT_TOKENS)
        self.output_tokens = self.instruments.counter(metrics.OUTPUT_TOKENS)
        self.errors = self.instruments.counter(metrics.GENERATION_ERRORS)
        self.instruments.read(metrics.HTTP_OPEN, lambda: self.num_open)
        self.instruments.read(metrics.HTTP_STREAMS, lambda: self.num_streams)

    @classmethod
    def start(cls, config: GatewayConfig) -> Self | None:
        """What the configuration asks for; None where it asks for nothing. Raises ConfigError."""
        if not (config.metrics_port or config.is_traced):
            return None
        tracing = start_tracing(config, "gateway")
        telemetry = cls(tracing)
        if config.metrics_port:
            telemetry.instruments.serve(config.host, config.metrics_port)
        return telemetry

    def span_of(self, route: str, scope: Scope) -> RequestSpan | None:
        """A span for a request that generates; probes and lists have none."""
        if self.tracing is None or scope["method"] != "POST" or route not in GENERATING:
            return None
        from gateway.telemetry.request_span import RequestSpan

        given = Headers(scope=scope).get("traceparent", "")
        return RequestSpan(self.tracing, route, scope["state"]["request_id"], given)

    def close(self) -> None:
        """Stops the endpoint, and exports the last spans."""
        self.instruments.close()
        if self.tracing is not None:
            self.tracing.close()


class Exchange(GenerationHooks):
    """One request and its response."""

    def __init__(self, telemetry: Telemetry, scope: Scope) -> None:
        self._telemetry = telemetry
        self._route = route_of(scope["path"])
        self._began = time.perf_counter()
        self._status = 0
        self._is_stream = self._is_complete = self._is_hung_up = self._has_text = False
        telemetry.num_open += 1
        self._span = telemetry.span_of(self._route, scope)
        if self._span is not None:
            scope["state"]["traceparent"] = self._span.traceparent

    def received(self, message: Message) -> None:
        """A message from the client's side."""
        self._is_hung_up |= message["type"] == "http.disconnect" and not self._is_complete

    def sent(self, message: Message) -> None:
        """A message to it."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._is_stream = Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")
            self._telemetry.num_streams += self._is_stream
        elif message["type"] == "http.response.body":
            self._is_complete = not message.get("more_body", False)

    def named(self, response_id: str, model: str) -> None:
        """The span carries the model, and the response's id."""
        if self._span is not None:
            self._span.named(response_id, model)

    def planned(self, plan: Plan) -> None:
        """Counts the prompts' tokens."""
        self._telemetry.input_tokens.inc(sum(plan.prompt_lengths))
        if self._span is not None:
            self._span.planned(plan)

    def grew(self) -> None:
        """Times the first text of the response."""
        if not self._has_text:
            self._has_text = True
            seconds = time.perf_counter() - self._began
            self._telemetry.first_token.observe(seconds)
            if self._span is not None:
                self._span.first_text(seconds)

    def ended(self, outcome: Outcome) -> None:
        """Counts the tokens of an answer that has ended."""
        self._telemetry.output_tokens.inc(outcome.num_tokens)
        if self._span is not None:
            self._span.ended(outcome)

    def failed(self, error: DraftwoodError) -> None:
        """Counts the error that the response ends with."""
        self._telemetry.errors.labels(error.reason).inc()
        if self._span is not None:
            self._span.failed(error)

    def end(self, *, is_fault: bool) -> None:
        """The request is over; `is_fault` where the application raised."""
        telemetry = self._telemetry
        status = self._status or (500 if is_fault else CLIENT_CLOSED_REQUEST)
        if self._is_hung_up:
            status = CLIENT_CLOSED_REQUEST
            telemetry.hang_ups.inc()
        telemetry.num_open -= 1
        telemetry.num_streams -= self._is_stream
        telemetry.requests.labels(self._route, str(status)).inc()
        telemetry.seconds.labels(self._route).observe(time.perf_counter() - self._began)
        if self._span is not None:
            self._span.end(status, is_stream=self._is_stream)


class TelemetryMiddleware:
    """Watches what goes in and out; the exchange is in the request's state."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self._app, self._telemetry = app, telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(self._telemetry, scope)
        scope.setdefault("state", {})["hooks"] = exchange
        is_fault = True

        async def watched_receive() -> Message:
            message = await receive()
            exchange.received(message)
            return message

        async def watched_send(message: Message) -> None:
            exchange.sent(message)
            await send(message)

        try:
            await self._app(scope, watched_receive, watched_send)
            is_fault = False
        finally:
            exchange.end(is_fault=is_fault)

"""What the gateway measures: each HTTP request from its arrival to the last byte of its answer."""

from __future__ import annotations

import time
from typing import Self

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwood.config import GatewayConfig
from draftwood.errors import DraftwoodError
from draftwood.telemetry import metrics
from draftwood.telemetry.instruments import Instruments
from gateway.generation import Watch
from gateway.plan import Plan
from gateway.sse import CLIENT_CLOSED_REQUEST
from gateway.stats import Outcome

ROUTES = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/version"})
MODELS_PREFIX = "/v1/models/"
OTHER = "other"  # paths come from clients and must not become labels


def route_of(path: str) -> str:
    """The route that a path belongs to, as a label."""
    return path if path in ROUTES else f"{MODELS_PREFIX}{{name}}" if path.startswith(MODELS_PREFIX) else OTHER


class Telemetry:
    """The gateway's metrics."""

    def __init__(self) -> None:
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
        if not config.metrics_port:
            return None
        telemetry = cls()
        telemetry.instruments.serve(config.host, config.metrics_port)
        return telemetry

    def close(self) -> None:
        """Stops the endpoint."""
        self.instruments.close()


class Exchange(Watch):
    """One request and its response."""

    def __init__(self, telemetry: Telemetry, scope: Scope) -> None:
        self._telemetry = telemetry
        self._route = route_of(scope["path"])
        self._began = time.perf_counter()
        self._status = 0
        self._is_stream = self._is_complete = self._is_hung_up = self._has_text = False
        telemetry.num_open += 1

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

    def planned(self, plan: Plan) -> None:
        """Its prompts are known."""
        self._telemetry.input_tokens.inc(sum(plan.prompt_lengths))

    def grew(self) -> None:
        """An answer has text, or more of it."""
        if not self._has_text:
            self._has_text = True
            self._telemetry.first_token.observe(time.perf_counter() - self._began)

    def ended(self, outcome: Outcome) -> None:
        """One of its answers has ended."""
        self._telemetry.output_tokens.inc(outcome.num_tokens)

    def failed(self, error: DraftwoodError) -> None:
        """It ends with an error."""
        self._telemetry.errors.labels(error.reason).inc()

    def end(self, *, is_fault: bool) -> None:
        """The request is over; `is_fault` where the application raised."""
        telemetry = self._telemetry
        status = 500 if is_fault and not self._status else self._status or CLIENT_CLOSED_REQUEST
        telemetry.num_open -= 1
        telemetry.num_streams -= self._is_stream
        telemetry.requests.labels(self._route, str(CLIENT_CLOSED_REQUEST if self._is_hung_up else status)).inc()
        telemetry.seconds.labels(self._route).observe(time.perf_counter() - self._began)
        if self._is_hung_up:
            telemetry.hang_ups.inc()


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
        scope.setdefault("state", {})["watch"] = exchange
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

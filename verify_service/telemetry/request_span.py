"""The span of one Generate call, with the time before its steps: in the queue, and in the prefill."""

from __future__ import annotations

from opentelemetry.trace import StatusCode

from draftwood.telemetry.tracing import Tracing, is_sampled, traceparent_of
from verify_service.core.events import Finished
from verify_service.core.request import Request

METHOD = "draftwood.v1.VerifyService/Generate"
ANSWERED = ("stop", "length")


class RequestSpan:
    """From the call's arrival to its end. `traceparent` is what its steps belong to; empty where it is not sampled."""

    def __init__(self, tracing: Tracing, request: Request, began_ns: int) -> None:
        self._tracing, self._began_ns = tracing, began_ns
        self._span = tracing.span(
            METHOD,
            request.traceparent,
            is_server=True,
            start_ns=began_ns,
            attributes={
                "rpc.system.name": "grpc",
                "rpc.method": METHOD,
                "draftwood.request_id": request.request_id,
                "draftwood.algorithm": request.algorithm,
                "draftwood.tree_budget": request.tree_budget,
                "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
            },
        )
        self.traceparent = traceparent_of(self._span) if is_sampled(self._span) else ""

    def finished(self, event: Finished) -> None:
        """The figures of the answer."""
        stats, at = event.stats, self._began_ns
        for name, seconds in (("queue", stats.queue_s), ("prefill", stats.prefill_s)):
            part = self._tracing.span(name, self._span, start_ns=at)
            at += round(seconds * 1e9)
            part.end(at)
        self._span.set_attributes(
            {
                "gen_ai.usage.output_tokens": stats.num_generated_tokens,
                "draftwood.steps": stats.num_steps,
                "draftwood.drafted_tokens": stats.num_drafted_tokens,
                "draftwood.accepted_tokens": stats.num_accepted_tokens,
                "draftwood.fallback_steps": stats.num_fallback_steps,
            }
        )

    def end(self, outcome: str) -> None:
        """The call is over: "stop", "length", "cancelled", or an error's reason."""
        self._span.set_attribute("draftwood.outcome", outcome)
        if outcome not in ANSWERED:
            self._span.set_attribute("error.type", outcome)
            if outcome != "cancelled":
                self._span.set_status(StatusCode.ERROR)
        self._span.end()

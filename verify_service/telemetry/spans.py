"""Spans of a Generate call: the time in the queue and in the prefill, and its steps with their five stages.

A step for several traced requests is a child of the first one's span and has links to the others'.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from opentelemetry.trace import Span, StatusCode

from draftwood.telemetry.metrics import STAGES
from draftwood.telemetry.tracing import Tracing, is_sampled, traceparent_of
from verify_service.core.events import Finished
from verify_service.core.request import Request
from verify_service.core.sequence import SequenceState
from verify_service.core.stats import SequenceStep, StageTimes

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
        stats = event.stats
        queued = _part(self._tracing, "queue", self._span, self._began_ns, stats.queue_s)
        _part(self._tracing, "prefill", self._span, queued, stats.prefill_s)
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


class StepSpans:
    """Used on the device loop. Steps without a traced request cost a look at each."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._began_ns = 0
        self._open: tuple[Span, Span] | None = None  # the step and its draft stage

    def begin(self, batch: Sequence[SequenceState]) -> str:
        """Opens the step and its first stage, to which what the drafter does belongs."""
        if self._open is not None:
            step, draft = self._open  # it failed
            self._open = None
            step.set_status(StatusCode.ERROR)
            draft.end()
            step.end()
        traced = [s.request.traceparent for s in batch if s.request.traceparent]
        if not traced:
            return ""
        self._began_ns = time.time_ns()
        step = self._tracing.span(
            "step",
            traced[0],
            start_ns=self._began_ns,
            links=tuple(traced[1:]),
            attributes={"draftwood.batch": len(batch)},
        )
        draft = self._tracing.span("draft", step, is_client=True, start_ns=self._began_ns)
        self._open = step, draft
        return traceparent_of(draft)

    def step(self, steps: Sequence[SequenceStep], times: StageTimes) -> None:
        """Closes them, with the other stages behind the first: they follow each other without a gap."""
        if self._open is None:
            return
        (span, draft), self._open = self._open, None
        at = self._began_ns + _ns(times.draft)
        draft.set_attribute("draftwood.drafter_busy_ms", times.drafter_busy * 1e3)
        draft.set_attribute("draftwood.transport_ms", times.transport * 1e3)
        draft.end(at)
        for name in STAGES[1:]:
            at = _part(self._tracing, name, span, at, getattr(times, name))
        span.set_attribute("draftwood.drafted_tokens", sum(step.num_drafted for step in steps))
        span.set_attribute("draftwood.accepted_tokens", sum(step.num_accepted for step in steps))
        span.set_attribute("draftwood.fallbacks", sum(step.wanted_draft and not step.num_drafted for step in steps))
        span.end(at)


def _part(tracing: Tracing, name: str, parent: Span, start_ns: int, seconds: float) -> int:
    """A span that is over; returns its end."""
    span, end_ns = tracing.span(name, parent, start_ns=start_ns), start_ns + _ns(seconds)
    span.end(end_ns)
    return end_ns


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)

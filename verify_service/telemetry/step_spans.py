"""Spans of steps: a step with its five stages, below the request that it is for.

A step for several traced requests is a child of the first one's span and has links to the others'.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from opentelemetry.trace import Span, StatusCode

from draftwood.telemetry.tracing import Tracing, traceparent_of
from verify_service.core.sequence import SequenceState
from verify_service.core.stats import StageTimes
from verify_service.step.step_stats import SequenceStep


class StepSpans:
    """Used on the device loop. Steps without a traced request cost a look at each."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._began_ns = 0
        self._open: tuple[Span, Span] | None = None  # the step and its draft stage

    def begin(self, batch: Sequence[SequenceState]) -> str:
        """Opens the step and its first stage, to which what the drafter does belongs."""
        if self._open is not None:
            self._abandon(*self._open)
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
        stages = (("tree", times.tree), ("verify", times.verify), ("accept", times.accept), ("commit", times.commit))
        for name, seconds in stages:
            stage = self._tracing.span(name, span, start_ns=at)
            at += _ns(seconds)
            stage.end(at)
        span.set_attribute("draftwood.drafted_tokens", sum(step.tree.num_nodes - 1 for step in steps))
        span.set_attribute("draftwood.accepted_tokens", sum(step.num_accepted for step in steps))
        fallbacks = sum(step.wanted_draft and step.tree.num_nodes == 1 for step in steps)
        span.set_attribute("draftwood.fallbacks", fallbacks)
        span.end(at)

    def _abandon(self, step: Span, draft: Span) -> None:
        """The step failed."""
        self._open = None
        step.set_status(StatusCode.ERROR)
        draft.end()
        step.end()


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)

"""What the verify service exports: readings of what the engine, its observer and the draft client count, and times."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self

from draftwood.config import VerifyConfig
from draftwood.errors import DraftwoodError
from draftwood.telemetry import metrics, start_tracing
from draftwood.telemetry.instruments import Instruments
from verify_service.core.events import Finished, Started, Tokens
from verify_service.core.request import Request
from verify_service.core.stats import SequenceStep, StageTimes
from verify_service.draft.client import DraftClient
from verify_service.draft.types import DroppedResults
from verify_service.engine.engine import PATIENCE_S, Engine

if TYPE_CHECKING:
    from draftwood.telemetry.tracing import Tracing
    from verify_service.telemetry.spans import RequestSpan

DRAFTER_STATES = ("ready", "absent", "refused", "mismatch", "none")  # none: it is to serve without


class Telemetry:
    """The verify service's metrics and spans; `start` makes it take part in every step where it was asked for."""

    def __init__(self, engine: Engine, client: DraftClient | None, tracing: Tracing | None = None) -> None:
        self.tracing = tracing
        self.instruments = Instruments("verify")
        self._engine, self._client, self._observer = engine, client, engine.runner.observer
        recorded = self.instruments
        stages = recorded.histogram(metrics.STAGE_SECONDS)
        self._stages = {stage: stages.labels(stage).observe for stage in metrics.STAGES}
        self._transport = recorded.histogram(metrics.TRANSPORT_SECONDS).observe
        self._nodes = recorded.histogram(metrics.TREE_NODES).observe
        self._paths = recorded.histogram(metrics.ACCEPTED_PATH).observe
        self.requests = recorded.counter(metrics.REQUESTS)
        self.request_seconds = recorded.histogram(metrics.REQUEST_SECONDS).observe
        self.queue_seconds = recorded.histogram(metrics.QUEUE_SECONDS).observe
        self.prefill_seconds = recorded.histogram(metrics.PREFILL_SECONDS).observe
        self.first_token = recorded.histogram(metrics.TIME_TO_FIRST_TOKEN).observe
        self.per_token = recorded.histogram(metrics.TIME_PER_OUTPUT_TOKEN).observe
        self.prompt_tokens = recorded.counter(metrics.PROMPT_TOKENS)
        self.generated_tokens = recorded.counter(metrics.GENERATED_TOKENS)
        self._read_engine()
        self._read_drafter()

    @classmethod
    def start(cls, config: VerifyConfig, engine: Engine, client: DraftClient | None) -> Self:
        """Exports what the configuration asks for. Raises ConfigError."""
        telemetry, observer = cls(engine, client, start_tracing(config, "verify")), engine.runner.observer
        if config.metrics_port:
            observer.recorders.append(telemetry.step)
            telemetry.instruments.serve(config.host, config.metrics_port)
        if telemetry.tracing is not None:
            from verify_service.telemetry.spans import StepSpans

            spans = StepSpans(telemetry.tracing)
            observer.begin = spans.begin
            observer.recorders.append(spans.step)
        return telemetry

    def close(self) -> None:
        """Stops the endpoint, and exports the last spans."""
        self.instruments.close()
        if self.tracing is not None:
            self.tracing.close()

    @contextmanager
    def watch(self) -> Generator[MeasuredRequest]:
        """Measures the body, a call of Generate that has just come."""
        request = MeasuredRequest(self)
        try:
            yield request
        except DraftwoodError as error:
            request.outcome = error.reason
            raise
        finally:
            request.end()

    def step(self, steps: Sequence[SequenceStep], times: StageTimes) -> None:
        """Records one step; on the device loop."""
        for stage, observe in self._stages.items():
            observe(getattr(times, stage))
        drafted = [step for step in steps if step.num_drafted]
        for step in drafted:
            self._nodes(step.num_drafted)
            self._paths(step.num_accepted)
        if drafted:
            self._transport(times.transport)

    def _read_engine(self) -> None:
        read, scheduler = self.instruments.read, self._engine.scheduler
        read(metrics.RUNNING, lambda: len(scheduler.active))
        read(metrics.QUEUED, lambda: len(scheduler.waiting))
        read(metrics.QUEUE_LIMIT, lambda: scheduler.max_queue)
        read(metrics.BATCH_LIMIT, lambda: scheduler.max_batch)
        read(metrics.PAGES_USED, lambda: scheduler.pages.num_used)
        read(metrics.PAGES, lambda: scheduler.pages.num_pages)
        read(metrics.SLOTS_USED, lambda: scheduler.slots.num_used)
        read(metrics.SLOTS, lambda: scheduler.slots.num_slots)
        read(metrics.LOOP_TURNING, lambda: float(self._engine.is_turning(PATIENCE_S)))
        read(metrics.STEPS, lambda: self._engine.num_steps)
        totals = self._observer.totals

        def accepted_depth() -> Mapping[str, float]:
            """A step that accepted n tokens accepted one of each depth up to n."""
            return _by_depth([*accumulate(reversed(totals.accepted_histogram[1:]))][::-1])

        read(
            metrics.SEQUENCE_STEPS,
            lambda: {
                "drafted": totals.num_drafted_steps,
                "fallback": totals.num_fallback_steps,
                "plain": totals.num_plain_steps,
            },
        )
        read(metrics.DRAFTED_TOKENS, lambda: totals.num_drafted_tokens)
        read(metrics.ACCEPTED_TOKENS, lambda: totals.num_accepted_tokens)
        read(metrics.SHADOW_TOKENS, lambda: totals.shadow_tree_tokens)
        read(metrics.DRAFTED_DEPTH, lambda: _by_depth(totals.drafted_by_depth))
        read(metrics.ACCEPTED_DEPTH, accepted_depth)

    def _read_drafter(self) -> None:
        read, client, alarm = self.instruments.read, self._client, self._observer.alarm

        def states() -> dict[str, float]:
            now = client.status.partition(":")[0] if client is not None else "none"
            return {name: float(name == now) for name in DRAFTER_STATES}

        def stale() -> Mapping[str, float]:
            dropped = client.dropped if client is not None else DroppedResults()
            return {"late": dropped.late, "mismatched": dropped.mismatched}

        read(metrics.DRAFTER_STATE, states)
        read(metrics.DRAFTER_MISMATCH, lambda: states()["mismatch"])
        read(
            metrics.ACCEPTANCE_COLLAPSE, lambda: float(alarm.is_on and client is not None and client.stream is not None)
        )
        read(metrics.FALLBACKS, lambda: _by_cause(self._engine.coordinator.fallbacks))
        read(metrics.REFUSED_TREES, lambda: _by_cause(self._engine.coordinator.refused_trees))
        read(metrics.STALE_TREES, stale)


def _by_cause(counts: Mapping[Any, int]) -> dict[str, float]:
    return {cause.value: n for cause, n in counts.items()}


def _by_depth(counts: Sequence[int]) -> dict[str, float]:
    """Depths that were seen, and the first, so that the series is there from the start."""
    return {"1": 0, **{str(depth): n for depth, n in enumerate(counts[: metrics.MAX_DEPTH_LABEL], start=1)}}


class MeasuredRequest:
    """One call of Generate, on the event loop, measured from its arrival on."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry, self._began, self._began_ns = telemetry, time.perf_counter(), time.time_ns()
        self._has_tokens = False
        self.outcome = "cancelled"
        self._span: RequestSpan | None = None

    def received(self, request: Request) -> Request:
        """The request is in order; returned as it goes to the engine, its steps children of this call's span."""
        if self._telemetry.tracing is None:
            return request
        from verify_service.telemetry.spans import RequestSpan

        self._span = RequestSpan(self._telemetry.tracing, request, self._began_ns)
        return dataclasses.replace(request, traceparent=self._span.traceparent)

    def notice(self, event: Started | Tokens | Finished) -> None:
        """An event is about to be sent."""
        if isinstance(event, Tokens) and not self._has_tokens:
            self._has_tokens = True
            self._telemetry.first_token(time.perf_counter() - self._began)
        elif isinstance(event, Finished):
            self._finished(event)

    def _finished(self, event: Finished) -> None:
        telemetry, stats = self._telemetry, event.stats
        self.outcome = event.reason.name.lower()
        telemetry.request_seconds(time.perf_counter() - self._began)
        telemetry.queue_seconds(stats.queue_s)
        telemetry.prefill_seconds(stats.prefill_s)
        telemetry.prompt_tokens.inc(stats.num_prompt_tokens)
        telemetry.generated_tokens.inc(stats.num_generated_tokens)
        if self._span is not None:
            self._span.finished(event)
        if stats.num_generated_tokens > 1:
            telemetry.per_token(stats.decode_s / (stats.num_generated_tokens - 1))

    def end(self) -> None:
        """The call is over, however."""
        self._telemetry.requests.labels(self.outcome).inc()
        if self._span is not None:
            self._span.end(self.outcome)

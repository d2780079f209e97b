"""What the verify service exports: readings of what the engine, its observer and the draft client count, and times."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Self

from draftwood.config import VerifyConfig
from draftwood.errors import DraftwoodError
from draftwood.telemetry import metrics, start_tracing
from draftwood.telemetry.instruments import Instruments
from verify_service.api.request_hooks import RequestHooks
from verify_service.core.events import Finished
from verify_service.core.request import Request
from verify_service.core.stats import StageTimes
from verify_service.draft.client import DraftClient
from verify_service.draft.types import DroppedResults, RefusalReason
from verify_service.engine.engine import PATIENCE_S, Engine
from verify_service.step.step_stats import SequenceStep, StepTotals

if TYPE_CHECKING:
    from draftwood.telemetry.tracing import Tracing
    from verify_service.telemetry.request_span import RequestSpan

DRAFTER_STATES = ("ready", "absent", "refused", "mismatch", "none")  # none: it is to serve without


class Telemetry:
    """The verify service's metrics and spans. Takes part in every step, as the sink of the engine's observer."""

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
        self._read_load()
        self._read_totals(self._observer.totals)
        self._read_drafter()

    @classmethod
    def start(cls, config: VerifyConfig, engine: Engine, client: DraftClient | None) -> Self | None:
        """What the configuration asks for; None where it asks for nothing. Raises ConfigError."""
        if not (config.metrics_port or config.is_traced):
            return None
        tracing = start_tracing(config, "verify")
        if tracing is not None:
            from verify_service.telemetry.step_spans import StepSpans

            engine.runner.observer.tracer = StepSpans(tracing)
        telemetry = cls(engine, client, tracing)
        if config.metrics_port:
            telemetry._observer.sink = telemetry
            telemetry.instruments.serve(config.host, config.metrics_port)
        return telemetry

    def close(self) -> None:
        """Stops the endpoint, and exports the last spans."""
        self.instruments.close()
        if self.tracing is not None:
            self.tracing.close()

    def watch(self) -> RequestHooks:
        """For one call of Generate that has just come."""
        return MeasuredRequest(self)

    def step(self, steps: Sequence[SequenceStep], times: StageTimes) -> None:
        """Records one step; on the device loop."""
        observe = self._stages
        observe["draft"](times.draft)
        observe["tree"](times.tree)
        observe["verify"](times.verify)
        observe["accept"](times.accept)
        observe["commit"](times.commit)
        is_drafted = False
        for step in steps:
            num_drafted = step.tree.num_nodes - 1
            if num_drafted:
                is_drafted = True
                self._nodes(num_drafted)
                self._paths(step.num_accepted)
        if is_drafted:
            self._transport(times.transport)

    def _read_load(self) -> None:
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

    def _read_totals(self, totals: StepTotals) -> None:
        read = self.instruments.read
        read(
            metrics.SEQUENCE_STEPS,
            lambda: {"drafted": totals.drafted_steps, "fallback": totals.fallback_steps, "plain": totals.plain_steps},
        )
        read(metrics.DRAFTED_TOKENS, lambda: totals.drafted_tokens)
        read(metrics.ACCEPTED_TOKENS, lambda: totals.accepted_tokens)
        read(metrics.SHADOW_TOKENS, lambda: totals.shadow_tokens)
        read(metrics.DRAFTED_DEPTH, lambda: _by_depth(totals.drafted_depth))
        read(metrics.ACCEPTED_DEPTH, lambda: _by_depth(totals.accepted_depth))

    def _read_drafter(self) -> None:
        read, client, alarm = self.instruments.read, self._client, self._observer.alarm

        def state() -> Mapping[str, float]:
            now = client.status.partition(":")[0] if client is not None else "none"
            return {name: float(name == now) for name in DRAFTER_STATES}

        def stale() -> Mapping[str, float]:
            dropped = client.dropped if client is not None else DroppedResults()
            return {"late": dropped.late, "mismatched": dropped.mismatched}

        def refused() -> Mapping[str, float]:
            counts = self._engine.coordinator.refused_trees
            return {cause.value: counts[cause] for cause in RefusalReason if cause is not RefusalReason.STALE}

        read(metrics.DRAFTER_STATE, state)
        read(metrics.DRAFTER_MISMATCH, lambda: float(client is not None and client.mismatch is not None))
        read(
            metrics.ACCEPTANCE_COLLAPSE, lambda: float(alarm.is_on and client is not None and client.stream is not None)
        )
        read(metrics.FALLBACKS, lambda: {cause.value: n for cause, n in self._engine.coordinator.fallbacks.items()})
        read(metrics.REFUSED_TREES, refused)
        read(metrics.STALE_TREES, stale)


def _by_depth(counts: list[int]) -> dict[str, float]:
    """Depths that were seen, and the first, so that the series is there from the start."""
    return {str(depth): n for depth, n in enumerate(counts, start=1) if n or depth == 1}


class MeasuredRequest(RequestHooks):
    """Measures from the call's arrival on."""

    def __init__(self, telemetry: Telemetry, clock: Callable[[], float] = time.perf_counter) -> None:
        self._telemetry, self._clock, self._began = telemetry, clock, clock()
        self._began_ns = time.time_ns()
        self._has_tokens = False
        self._outcome = "cancelled"
        self._span: RequestSpan | None = None

    def received(self, request: Request) -> Request:
        """From here on it has a span; its steps become children of it."""
        if self._telemetry.tracing is None:
            return request
        from verify_service.telemetry.request_span import RequestSpan

        self._span = RequestSpan(self._telemetry.tracing, request, self._began_ns)
        return dataclasses.replace(request, traceparent=self._span.traceparent)

    def grew(self) -> None:
        """Notes the first tokens."""
        if not self._has_tokens:
            self._has_tokens = True
            self._telemetry.first_token(self._clock() - self._began)

    def finished(self, event: Finished) -> None:
        """Takes over the figures."""
        telemetry, stats = self._telemetry, event.stats
        self._outcome = event.reason.name.lower()
        telemetry.request_seconds(self._clock() - self._began)
        telemetry.queue_seconds(stats.queue_s)
        telemetry.prefill_seconds(stats.prefill_s)
        telemetry.prompt_tokens.inc(stats.num_prompt_tokens)
        telemetry.generated_tokens.inc(stats.num_generated_tokens)
        if self._span is not None:
            self._span.finished(event)
        if stats.num_generated_tokens > 1:
            telemetry.per_token(stats.decode_s / (stats.num_generated_tokens - 1))

    def failed(self, error: DraftwoodError) -> None:
        """By the error's reason."""
        self._outcome = error.reason

    def gone(self) -> None:
        """Counts it."""
        self._telemetry.requests.labels(self._outcome).inc()
        if self._span is not None:
            self._span.end(self._outcome)

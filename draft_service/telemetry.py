"""What the draft service measures: its messages, and readings of its cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

from draft_service.draft.drafter import Drafter
from draft_service.draft.types import Drafted, Refusal, RefusalReason, StepOutcome
from draftwood.config import DraftConfig
from draftwood.telemetry import metrics, start_tracing
from draftwood.telemetry.instruments import Instruments

if TYPE_CHECKING:
    from draftwood.telemetry.tracing import Tracing


class Answer(NamedTuple):
    """An answer that goes out; times in seconds, `busy_s` from the receipt of the message."""

    traceparent: str
    num_results: int
    busy_s: float
    draft_s: float
    tree_s: float


class Watch:
    """Is told what the drafter does, and does nothing about it."""

    def answered(self, results: Sequence[Drafted | Refusal], outcome: StepOutcome) -> None:
        """A message that asked for trees has been served; called on the drafter's thread."""

    def sent(self, answer: Answer) -> None:
        """An answer is ready to be sent; called on the event loop."""

    def prefilled(self, traceparent: str, num_rows: int, seconds: float) -> None:
        """A Prefill call has brought its rows; called on the event loop."""


UNWATCHED = Watch()


class Telemetry(Watch):
    """The draft service's metrics and spans."""

    def __init__(self, drafter: Drafter, tracing: Tracing | None = None) -> None:
        self._tracing = tracing
        self.instruments = Instruments("draft")
        cache = drafter.cache
        self._num_messages = self._num_trees = 0
        self._refusals = dict.fromkeys(RefusalReason, 0)
        self._batch = self.instruments.histogram(metrics.DRAFT_BATCH)
        self._pass = self.instruments.histogram(metrics.DRAFT_PASS_SECONDS)
        self._tree = self.instruments.histogram(metrics.DRAFT_TREE_SECONDS)
        self._busy = self.instruments.histogram(metrics.DRAFT_BUSY_SECONDS)
        read = self.instruments.read
        read(metrics.DRAFT_SEQUENCES, lambda: cache.num_sequences)
        read(metrics.DRAFT_SLOTS, lambda: cache.num_sequences + cache.num_free)
        read(metrics.DRAFT_CONTEXT_TOKENS, lambda: cache.num_tokens)
        read(metrics.DRAFT_MESSAGES, lambda: self._num_messages)
        read(metrics.DRAFT_TREES, lambda: self._num_trees)
        read(metrics.DRAFT_REFUSALS, lambda: {reason.value: n for reason, n in self._refusals.items()})

    @classmethod
    def start(cls, config: DraftConfig, drafter: Drafter) -> Self | None:
        """What the configuration asks for; None where it asks for nothing. Raises ConfigError."""
        if not (config.metrics_port or config.is_traced):
            return None
        tracing = start_tracing(config, "draft")
        telemetry = cls(drafter, tracing)
        if config.metrics_port:
            telemetry.instruments.serve(config.host, config.metrics_port)
        return telemetry

    def close(self) -> None:
        """Stops the endpoint, and exports the last spans."""
        self.instruments.close()
        if self._tracing is not None:
            self._tracing.close()

    def read_streams(self, num_open: Callable[[], int]) -> None:
        """Exports how many Draft streams are open."""
        self.instruments.read(metrics.DRAFT_STREAMS, num_open)

    def answered(self, results: Sequence[Drafted | Refusal], outcome: StepOutcome) -> None:
        """Counts trees and refusals."""
        self._num_messages += 1
        for result in results:
            if isinstance(result, Refusal):
                self._refusals[result.reason] += 1
            else:
                self._num_trees += 1
        self._batch.observe(len(results))
        self._pass.observe(outcome.draft_s)
        self._tree.observe(outcome.tree_s)

    def sent(self, answer: Answer) -> None:
        """Times the whole; nothing hangs below its span, so that it is made now that it is over."""
        self._busy.observe(answer.busy_s)
        self._span(
            "draftwood.v1.DraftService/Draft",
            answer.traceparent,
            answer.busy_s,
            {
                "draftwood.batch": answer.num_results,
                "draftwood.draft_pass_ms": answer.draft_s * 1e3,
                "draftwood.tree_build_ms": answer.tree_s * 1e3,
            },
        )

    def prefilled(self, traceparent: str, num_rows: int, seconds: float) -> None:
        """Likewise."""
        self._span("draftwood.v1.DraftService/Prefill", traceparent, seconds, {"draftwood.rows": num_rows})

    def _span(self, method: str, traceparent: str, seconds: float, attributes: dict[str, int | float]) -> None:
        """Without a caller that is traced there is none: steps begin no traces."""
        if self._tracing is None or not traceparent:
            return
        now = time.time_ns()
        self._tracing.span(
            method,
            traceparent,
            is_server=True,
            start_ns=now - round(seconds * 1e9),
            attributes={"rpc.system.name": "grpc", "rpc.method": method, **attributes},
        ).end(now)

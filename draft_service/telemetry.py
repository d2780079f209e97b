"""What the draft service measures: its messages, and readings of its cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from draft_service.drafter import Drafted, Drafter, Reason, Refused, StepOutcome
from draft_service.streams import StreamRegistry
from draftwood.config import DraftConfig
from draftwood.telemetry import metrics
from draftwood.telemetry.instruments import Instruments


class Watch:
    """Is told what the drafter does; this one does not care."""

    def answered(self, results: Sequence[Drafted | Refused], outcome: StepOutcome) -> None:
        """A message that asked for trees has been served; on the drafter's thread."""

    def sent(self, busy_s: float) -> None:
        """Its answer is ready, so long after its receipt; on the event loop."""


UNWATCHED = Watch()


class Telemetry(Watch):
    """The draft service's metrics."""

    def __init__(self, drafter: Drafter) -> None:
        self.instruments = Instruments("draft")
        cache = drafter.cache
        self._num_messages = self._num_trees = 0
        self._refusals = dict.fromkeys(Reason, 0)
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
        read(metrics.DRAFT_REFUSALS, lambda: {reason.name.lower(): n for reason, n in self._refusals.items()})

    @classmethod
    def start(cls, config: DraftConfig, drafter: Drafter) -> Self | None:
        """What the configuration asks for; None where it asks for nothing. Raises ConfigError."""
        if not config.metrics_port:
            return None
        telemetry = cls(drafter)
        telemetry.instruments.serve(config.host, config.metrics_port)
        return telemetry

    def close(self) -> None:
        """Stops the endpoint."""
        self.instruments.close()

    def read_streams(self, streams: StreamRegistry) -> None:
        """Counts these."""
        self.instruments.read(metrics.DRAFT_STREAMS, lambda: streams.num_open)

    def answered(self, results: Sequence[Drafted | Refused], outcome: StepOutcome) -> None:
        """Counts trees and refusals."""
        self._num_messages += 1
        for result in results:
            if isinstance(result, Refused):
                self._refusals[result.reason] += 1
            else:
                self._num_trees += 1
        self._batch.observe(len(results))
        self._pass.observe(outcome.draft_s)
        self._tree.observe(outcome.tree_s)

    def sent(self, busy_s: float) -> None:
        """Times the whole."""
        self._busy.observe(busy_s)

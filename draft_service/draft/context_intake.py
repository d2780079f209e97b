"""Feature rows of committed tokens on their way into the context cache: which are new, and what is missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from draft_service.cache.closed_sequences import ClosedSequences
from draft_service.cache.context_cache import CachedSequence, ContextCache, SequenceKey
from draft_service.draft.types import ContextRows, Refusal, RefusalReason

Fresh = Sequence[tuple[CachedSequence, Tensor]]  # rows [n, H] that continue what is cached of a sequence


class ContextIntake:
    """Opens and closes sequences. `append` brings new rows into the cache."""

    def __init__(self, cache: ContextCache, append: Callable[[Fresh], None]) -> None:
        self._cache, self._append = cache, append
        self._closed = ClosedSequences()

    def close(self, key: SequenceKey) -> None:
        """Frees a sequence; rows of it that are still on their way are dropped."""
        sequence = self._cache.find(key)
        if sequence is None:
            self._closed.add(key)
        else:
            self._closed.add(key, sequence.epoch)
            self._cache.close(key)

    def close_stream(self, stream_id: int) -> None:
        """Frees all sequences of a stream."""
        self._cache.close_stream(stream_id)
        self._closed.forget_stream(stream_id)

    def is_over(self, key: SequenceKey, epoch: int) -> bool:
        """Whether rows come too late: calls have no order, so that a close may overtake them."""
        return self._closed.is_over(key, epoch)

    def reopen(self, key: SequenceKey) -> None:
        """The sequence's own stream speaks of it: whatever was closed before is another one's."""
        self._closed.discard(key)

    def take(self, arrivals: Sequence[tuple[SequenceKey, int, ContextRows | None]]) -> list[CachedSequence | Refusal]:
        """Opens sequences at their epochs and caches their new rows, all rows of the message at once."""
        sequences: list[CachedSequence | Refusal] = []
        fresh: list[tuple[CachedSequence, Tensor]] = []
        for key, epoch, context in arrivals:
            sequence = self._open(key, epoch)
            if isinstance(sequence, CachedSequence) and context is not None:
                rows = self._new_rows(sequence, context)
                if isinstance(rows, Refusal):
                    sequence = rows
                elif rows.shape[0]:
                    fresh.append((sequence, rows))
            sequences.append(sequence)
        if fresh:
            self._append(fresh)
        return sequences

    def _open(self, key: SequenceKey, epoch: int) -> CachedSequence | Refusal:
        sequence = self._cache.open(key, epoch)
        if sequence is None:
            return Refusal(RefusalReason.CACHE_FULL, "every context slot is taken")
        if epoch < sequence.epoch:
            return Refusal(
                RefusalReason.INVALID, f"epoch is {epoch}, but the sequence is already at epoch {sequence.epoch}"
            )
        return sequence

    def _new_rows(self, sequence: CachedSequence, context: ContextRows) -> Tensor | Refusal:
        """The rows that are not cached yet."""
        end = context.start + context.features.shape[0]
        if end > self._cache.max_context:
            return Refusal(RefusalReason.CACHE_FULL, f"rows up to position {end} do not fit {self._cache.max_context}")
        if sequence.length == 0 and self._cache.window:  # such layers look at the end of the context only
            sequence.first = sequence.length = context.start
        if context.start > sequence.length:
            return Refusal(
                RefusalReason.CONTEXT_INCOMPLETE,
                f"rows start at position {context.start}, but the cache holds {sequence.length}",
                sequence.length,
            )
        return context.features[sequence.length - context.start :]

    def missing(self, sequence: CachedSequence, base_length: int) -> Refusal | None:
        """Why a root at `base_length` cannot be drafted for; None where its whole context is cached."""
        if sequence.length > base_length:
            message = f"base_length is {base_length}, but {sequence.length} rows are committed already"
            return Refusal(RefusalReason.INVALID, message)
        if self._cache.has_context(sequence, base_length):
            return None
        if sequence.length == base_length:  # the window's older part is missing: it must come again from the front
            sequence.first = sequence.length = 0
        message = f"base_length is {base_length}, but the cache holds {sequence.length} rows"
        return Refusal(RefusalReason.CONTEXT_INCOMPLETE, message, sequence.length)

"""Which sequences ended lately: rows that were on their way when one was closed must not open it again."""

from __future__ import annotations

from draft_service.cache.context_cache import SequenceKey

MAX_REMEMBERED = 1024  # of a stream; more do not end while a Prefill lasts
LAST_EPOCH = 2**32 - 1


class ClosedSequences:
    """The last sequences closed on each stream. Not thread-safe: the engine's thread owns it."""

    def __init__(self) -> None:
        self._epochs: dict[int, dict[int, int]] = {}  # by stream and sequence, latest last: the epoch that is over

    def add(self, key: SequenceKey, epoch: int = LAST_EPOCH) -> None:
        """A sequence was closed at this epoch; at every one where it was not known here."""
        epochs = self._epochs.setdefault(key.stream_id, {})
        epochs.pop(key.sequence_id, None)
        epochs[key.sequence_id] = epoch
        if len(epochs) > MAX_REMEMBERED:
            del epochs[next(iter(epochs))]

    def discard(self, key: SequenceKey) -> None:
        """The sequence's own stream opens it again."""
        self._epochs.get(key.stream_id, {}).pop(key.sequence_id, None)

    def is_over(self, key: SequenceKey, epoch: int) -> bool:
        """Whether the sequence was closed at this epoch or a later one."""
        return epoch <= self._epochs.get(key.stream_id, {}).get(key.sequence_id, 0)

    def forget_stream(self, stream_id: int) -> None:
        """A stream ended: its ids mean nothing any more."""
        self._epochs.pop(stream_id, None)

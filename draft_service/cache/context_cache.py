"""Keys and values of committed tokens, one preallocated slot per sequence.

A slot keeps the last rows of its sequence in order, and after them scratch rows for one draft block, so that a pass
over one sequence reads its context and block in place. Where every layer has a sliding window a slot holds two windows
and drops the older rows when it is full. Nothing is ever rolled back: only committed tokens come in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from draft_service.model.config import DrafterConfig


class SequenceKey(NamedTuple):
    """Names a sequence: ids are a stream's own."""

    stream_id: int
    sequence_id: int


@dataclass(slots=True)
class CachedSequence:
    """One sequence's slot; rows [0, length - first) hold positions [first, length)."""

    slot: int
    epoch: int
    first: int = 0
    length: int = 0

    @property
    def num_rows(self) -> int:
        """Rows in the slot."""
        return self.length - self.first


class ContextCache:
    """Slots and who has them. Not thread-safe: the engine's thread owns it."""

    def __init__(
        self, config: DrafterConfig, *, num_slots: int, max_context: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.max_context, self.window, self.block_size = max_context, config.context_window, config.block_size
        self.capacity = min(max_context, 2 * self.window) if self.window else max_context
        # A spare row: a view of a whole slot would have strides of its own, and those are compiled for anew.
        num_rows = self.capacity + config.block_size + 1
        shape = (len(config.layers), num_slots, config.num_kv_heads, num_rows, config.head_dim)
        # On a CPU, pages of these become memory when rows are written to them.
        self.keys = torch.empty(shape, dtype=dtype, device=device)  # [L, slots, G, capacity + N + 1, D]
        self.values = torch.empty_like(self.keys)
        self._free = list(reversed(range(num_slots)))
        self._sequences: dict[SequenceKey, CachedSequence] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens whose rows are cached."""
        return sum(sequence.num_rows for sequence in tuple(self._sequences.values()))

    @property
    def num_sequences(self) -> int:
        """Sequences that have a slot."""
        return len(self._sequences)

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    def find(self, key: SequenceKey) -> CachedSequence | None:
        """The sequence, or None where it is not open."""
        return self._sequences.get(key)

    def open(self, key: SequenceKey, epoch: int) -> CachedSequence | None:
        """The sequence at this epoch, empty if it is new or was at an earlier one; None where no slot is free."""
        sequence = self._sequences.get(key)
        if sequence is None:
            if not self._free:
                return None
            sequence = self._sequences[key] = CachedSequence(self._free.pop(), epoch)
        elif sequence.epoch < epoch:
            sequence.epoch, sequence.first, sequence.length = epoch, 0, 0
        return sequence

    def close(self, key: SequenceKey) -> None:
        """Frees a sequence; unknown ones are ignored."""
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            self._free.append(sequence.slot)

    def close_stream(self, stream_id: int) -> None:
        """Frees every sequence of a stream."""
        for key in [key for key in self._sequences if key.stream_id == stream_id]:
            self.close(key)

    def append(self, sequence: CachedSequence, keys: Tensor, values: Tensor) -> None:
        """Adds rows [n, L, G, D] for the positions from `sequence.length` on."""
        skipped, begin = self.reserve(sequence, keys.shape[0])
        keys, values = keys[skipped:], values[skipped:]
        end = begin + keys.shape[0]
        self.keys[:, sequence.slot, :, begin:end] = keys.permute(1, 2, 0, 3)
        self.values[:, sequence.slot, :, begin:end] = values.permute(1, 2, 0, 3)

    def reserve(self, sequence: CachedSequence, n: int) -> tuple[int, int]:
        """Makes room for `n` more positions, which count from now on; returns how many of them are out of every window
        already, and where in the slot the others go."""
        skipped = max(n - self.capacity, 0) if self.window else 0
        if skipped:
            sequence.length += skipped
            sequence.first = sequence.length
            n = self.capacity
        if sequence.num_rows + n > self.capacity:
            self._drop_oldest(sequence, keep=min(sequence.num_rows, self.window, self.capacity - n))
        begin = sequence.num_rows
        sequence.length += n
        return skipped, begin

    def _drop_oldest(self, sequence: CachedSequence, keep: int) -> None:
        assert self.window, "a slot without windows has room for max_context rows"
        end = sequence.num_rows
        for cache in (self.keys, self.values):
            rows = cache[:, sequence.slot]  # [L, G, capacity + N + 1, D]
            rows[:, :, :keep] = rows[:, :, end - keep : end].clone()
        sequence.first = sequence.length - keep

    def has_context(self, sequence: CachedSequence, base_length: int) -> bool:
        """Whether all rows that a root at `base_length` looks at are there."""
        needed = max(0, base_length - self.window + 1) if self.window else 0
        return sequence.length == base_length and sequence.first <= needed

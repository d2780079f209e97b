"""The host's part of a step: what changes is written every step, a row's settings once a sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftwood.tree import DraftTree
from verify_service.core.sequence import SequenceState
from verify_service.gpu.buffers import StepBuffers
from verify_service.kernels.arguments import MAX_STOP_IDS


def write_tree(
    buffers: StepBuffers, row: int, base_length: int, token_ids: Sequence[int], parents: Sequence[int]
) -> None:
    """A row's tree; what lies behind it must be spare already."""
    host, n = buffers.inputs.host, len(token_ids)
    host["input_ids"][row, :n] = token_ids
    host["parents"][row, :n] = parents
    host["num_nodes"][row] = n
    host["base_lengths"][row] = base_length


class HostInputs:
    """Writes into the buffers of one bucket, and remembers what is there."""

    def __init__(self, buffers: StepBuffers) -> None:
        self.buffers = buffers
        self._owners: list[int | None] = [None] * buffers.b
        self._nodes, self._filters = [0] * buffers.b, [False] * buffers.b
        buffers.clear()

    def write(self, rows: Sequence[int], group: Sequence[tuple[SequenceState, DraftTree]]) -> bool:
        """The inputs of a step: sequences and their trees in these rows, all others spare. Returns whether a row's
        draws are filtered."""
        if len(rows) < self.buffers.b:
            for row in {*range(self.buffers.b)}.difference(rows):
                if self._owners[row] is not None:
                    self._leave(row)
        host = self.buffers.inputs.host
        for row, (sequence, tree) in zip(rows, group, strict=True):
            if self._owners[row] != sequence.sequence_id:
                self._leave(row)
                self._settle(row, sequence)
            n = tree.num_nodes
            write_tree(self.buffers, row, sequence.base_length, tree.token_ids, tree.parents)
            if n < self._nodes[row]:
                host["parents"][row, n : self._nodes[row]] = -1
            self._nodes[row] = n
            host["remaining"][row] = max(sequence.num_remaining, 1)
        return any(self._filters)

    def _leave(self, row: int) -> None:
        """Makes the row a spare one."""
        self.buffers.clear(row)
        self._owners[row], self._nodes[row], self._filters[row] = None, 0, False

    def _settle(self, row: int, sequence: SequenceState) -> None:
        """What does not change while the sequence has the row."""
        host, sampling = self.buffers.inputs.host, sequence.request.sampling
        self._owners[row] = sequence.sequence_id
        host["state_slots"][row] = sequence.state_slot
        stops = sorted(sequence.request.stop_token_ids)[:MAX_STOP_IDS]
        host["stop_ids"][row, : len(stops)] = stops
        if not sampling.is_greedy:
            host["temperature"][row], host["top_k"][row] = sampling.temperature, sampling.top_k
            host["top_p"][row], host["min_p"][row] = sampling.top_p, sampling.min_p
            host["seeds"][row] = np.uint64(sampling.seed).astype(np.int64)
            self._filters[row] = bool(sampling.top_k) or sampling.top_p < 1.0 or sampling.min_p > 0.0

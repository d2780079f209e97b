"""Which sequence has which row of the batch, and the pages of each row on the device.

A sequence keeps its row as long as it can, so that its pages are sent once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwood.device.graphs import bucket
from verify_service.core.sequence import SequenceState


class RowTable:
    """Rows of sequences, lowest first. Used by the engine's thread only."""

    def __init__(self, num_rows: int, num_pages: int, device: torch.device) -> None:
        """`num_pages` of the longest sequence."""
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(num_rows, num_pages, dtype=torch.int32, pin_memory=is_cuda)
        self.pages: Tensor = torch.zeros(num_rows, num_pages, dtype=torch.int32, device=device)  # [rows, P]
        self._owners: list[int | None] = [None] * num_rows
        self._last: tuple[list[int], list[int]] = ([], [])  # of the step before: sequences and their rows

    def place(self, batch: Sequence[SequenceState]) -> list[int]:
        """A row for each sequence of a step; rows of sequences that take no part are free again."""
        ids = [s.sequence_id for s in batch]
        if ids == self._last[0]:
            return self._last[1]
        size = bucket(len(batch))
        present = set(ids)
        self._owners = [owner if owner in present and row < size else None for row, owner in enumerate(self._owners)]
        placed = {owner: row for row, owner in enumerate(self._owners) if owner is not None}
        free = (row for row, owner in enumerate(self._owners) if owner is None)
        for sequence in batch:
            if sequence.sequence_id not in placed:
                row = placed[sequence.sequence_id] = next(free)
                self._owners[row] = sequence.sequence_id
                self._send(row, sequence.pages)
        rows = [placed[i] for i in ids]
        self._last = (ids, rows)
        return rows

    def _send(self, row: int, pages: list[int]) -> None:
        values = self._host[row]
        values.zero_()
        values[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self.pages[row].copy_(values, non_blocking=True)

"""Static tensors of a step: what the host writes, what kernels derive from it, what comes back; each way in one copy.

Their addresses never change, so that a captured graph finds the next step's data where it found the last one's. Buckets
of different sizes share the large ones (the arena): only one step runs at a time. What changes is written every step, a
row's settings once per sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftwood.device.graphs import bucket
from draftwood.device.pinned_staging import PinnedStaging
from draftwood.tree import DraftTree
from verify_service.cache.commit_inputs import Arena
from verify_service.core.sequence import SequenceState
from verify_service.kernels.arguments import MAX_STOP_IDS, NODES_PER_WORD, DrawSettings, Outcome, TreeMetadata


class StepBuffers:
    """One bucket's: B rows of N nodes."""

    def __init__(
        self,
        b: int,
        n: int,
        *,
        arena: Arena,
        hidden: Tensor,  # [at least B N, H]
        page_table: Tensor,  # [max batch, P] int32 on the device
        max_path: int,
    ) -> None:
        self.b, self.n, self.max_path = b, n, max_path
        device, i32 = page_table.device, torch.int32
        numbers = ("num_nodes", "base_lengths", "state_slots", "remaining", "top_k")
        self.inputs = PinnedStaging(
            {
                "input_ids": ((b, n), torch.int64),
                "parents": ((b, n), i32),
                "stop_ids": ((b, MAX_STOP_IDS), i32),
                "seeds": ((b,), torch.int64),
                **dict.fromkeys(numbers, ((b,), i32)),
                "temperature": ((b,), torch.float32),
                **dict.fromkeys(("top_p", "min_p"), ((b,), torch.float64)),
            },
            device,
        )
        of = self.inputs.device
        words = -(-n // NODES_PER_WORD)

        def new(*size: int, dtype: torch.dtype = i32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.tree = TreeMetadata(
            **{name: of[name] for name in ("parents", "num_nodes", "base_lengths", "state_slots")},
            page_table=page_table[:b],
            positions=new(b, n, dtype=torch.int64),
            ancestors=new(b, n, words, dtype=torch.int64),
            depths=new(b, n),
            tree_depth=new(b),
            block_depth=new(b, words),
        )
        self.draws = DrawSettings(**{name: of[name] for name in DrawSettings.__dataclass_fields__})
        self.input_ids = of["input_ids"]
        self.drawn = new(b, n)  # the token drawn at each node, -1 where its logits are no distribution
        rows, each = ((b, max_path), i32), ((b,), i32)
        self.result = PinnedStaging({"path": rows, "tokens": rows, "path_length": each, "finish": each}, device)
        self.outcome = Outcome(**self.result.device)
        self.commit_inputs = arena.commit_inputs(b, n)
        self.hidden = hidden[: b * n].view(b, n, -1)
        # What `write_step` has left in each row: whose settings, nodes of its tree, whether its draws are filtered.
        self._owners: list[int | None] = [None] * b
        self._nodes, self._filters = [0] * b, [False] * b
        self.clear()

    def clear(self, row: int | None = None) -> None:
        """Makes a row, or every row, a spare one on the host, and what it says of paths empty."""
        host, rows = self.inputs.host, slice(None) if row is None else row
        for name in ("input_ids", "num_nodes", "base_lengths", "state_slots", "remaining", "temperature", "top_k"):
            host[name][rows] = 0
        host["parents"][rows] = -1
        host["stop_ids"][rows] = -1
        host["top_p"][rows] = 1.0
        host["min_p"][rows] = 0.0
        self.result.host["path_length"][rows] = 0

    def write_tree(self, row: int, base_length: int, token_ids: Sequence[int], parents: Sequence[int]) -> None:
        """A row's tree; what lies behind it must be spare already."""
        host, n = self.inputs.host, len(token_ids)
        host["input_ids"][row, :n] = token_ids
        host["parents"][row, :n] = parents
        host["num_nodes"][row] = n
        host["base_lengths"][row] = base_length

    def write_step(self, rows: Sequence[int], group: Sequence[tuple[SequenceState, DraftTree]]) -> bool:
        """The inputs of a step: sequences and their trees in these rows, all others spare. Returns whether a row's
        draws are filtered."""
        if len(rows) < self.b:
            for row in {*range(self.b)}.difference(rows):
                if self._owners[row] is not None:
                    self._leave(row)
        host = self.inputs.host
        for row, (sequence, tree) in zip(rows, group, strict=True):
            if self._owners[row] != sequence.sequence_id:
                self._leave(row)
                self._settle(row, sequence)
            n = tree.num_nodes
            self.write_tree(row, sequence.base_length, tree.token_ids, tree.parents)
            if n < self._nodes[row]:
                host["parents"][row, n : self._nodes[row]] = -1
            self._nodes[row] = n
            host["remaining"][row] = max(sequence.num_remaining, 1)
        return any(self._filters)

    def _leave(self, row: int) -> None:
        """Makes the row a spare one."""
        self.clear(row)
        self._owners[row], self._nodes[row], self._filters[row] = None, 0, False

    def _settle(self, row: int, sequence: SequenceState) -> None:
        """What does not change while the sequence has the row."""
        host, sampling = self.inputs.host, sequence.request.sampling
        self._owners[row] = sequence.sequence_id
        host["state_slots"][row] = sequence.state_slot
        stops = sorted(sequence.request.stop_token_ids)[:MAX_STOP_IDS]
        host["stop_ids"][row, : len(stops)] = stops
        if not sampling.is_greedy:
            host["temperature"][row], host["top_k"][row] = sampling.temperature, sampling.top_k
            host["top_p"][row], host["min_p"][row] = sampling.top_p, sampling.min_p
            host["seeds"][row] = np.uint64(sampling.seed).astype(np.int64)
            self._filters[row] = bool(sampling.top_k) or sampling.top_p < 1.0 or sampling.min_p > 0.0


class RowTable:
    """Which sequence has which row of the batch, lowest first, and the pages of each row on the device. A sequence
    keeps its row as long as it can, so that its pages are sent once."""

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

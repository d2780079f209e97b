"""Static tensors of a step: what the host writes in one copy, what kernels derive from it, what comes back in one copy.

Their addresses never change, so that a captured graph finds the next step's data where it found the last one's. Buckets
of different sizes share the large ones (the arena): only one step runs at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.device.pinned_staging import PinnedStaging
from verify_service.cache.commit_inputs import Arena
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
        device, i32, f32 = page_table.device, torch.int32, torch.float32
        self.inputs = PinnedStaging(
            {
                "input_ids": ((b, n), torch.int64),
                "seeds": ((b,), torch.int64),
                "parents": ((b, n), i32),
                "num_nodes": ((b,), i32),
                "base_lengths": ((b,), i32),
                "state_slots": ((b,), i32),
                "remaining": ((b,), i32),
                "top_k": ((b,), i32),
                "stop_ids": ((b, MAX_STOP_IDS), i32),
                "temperature": ((b,), f32),
                "top_p": ((b,), torch.float64),
                "min_p": ((b,), torch.float64),
            },
            device,
        )
        of = self.inputs.device
        words = -(-n // NODES_PER_WORD)

        def new(*size: int, dtype: torch.dtype = i32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.tree = TreeMetadata(
            parents=of["parents"],
            num_nodes=of["num_nodes"],
            base_lengths=of["base_lengths"],
            state_slots=of["state_slots"],
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

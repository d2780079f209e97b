"""Static tensors of a step: what the host writes in one copy, what kernels derive from it, what comes back in one copy.

Their addresses never change, so that a captured graph finds the next step's data where it found the last one's. Buckets
of different sizes share the large ones (the arena): only one step runs at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftwood.device.pinned_staging import Staging
from verify_service.core.accept import Finish
from verify_service.kernels.reference.ancestors import NODES_A_WORD
from verify_service.model.spec import NO_RECURRENCE, TargetSpec

MAX_STOP_IDS = 16
FINISHES = (None, Finish.STOP, Finish.LENGTH)  # by their numbers in an outcome
NO_DRAW = len(FINISHES)  # the number of a walk that came to a node whose logits are no distribution


@dataclass(frozen=True, slots=True)
class Structure:
    """What the kernels of one pass share: B sequences with N nodes each, W words of NODES_A_WORD nodes."""

    parents: Tensor  # [B, N] int32, -1 for the root and spare nodes
    num_nodes: Tensor  # [B] int32, 0 for a spare row
    base_lengths: Tensor  # [B] int32
    state_slots: Tensor  # [B] int32
    page_table: Tensor  # [B, P] int32
    positions: Tensor  # [B, N] int64
    ancestors: Tensor  # [B, N, W] int64, bit j % 64 of word j // 64: j is i or its ancestor
    depths: Tensor  # [B, N] int32
    tree_depth: Tensor  # [B] int32
    block_depth: Tensor  # [B, W] int32


@dataclass(frozen=True, slots=True)
class Stash:
    """What one pass leaves for the commit. K of GDN is normalised through `norms`; Mamba2 has none."""

    keys: Tensor  # [A, B, N, HKV, D], rotated
    values: Tensor  # [A, B, N, HKV, D]
    inputs: Tensor  # [R, B, N, C], before the convolution
    conv: Tensor  # [R, B, N, C], after it
    norms: Tensor  # [R, B, N, 2 HK] float32: 1 / |q|, 1 / |k|
    g: Tensor  # [R, B, N, HV] float32, log decay
    beta: Tensor  # [R, B, N, HV] float32: GDN's beta, Mamba2's time step


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an accept walk decides, in the graph or by the host; a row with path_length 0 commits nothing."""

    path: Tensor  # [B, D_path] int32, nodes, root first
    path_length: Tensor  # [B] int32
    tokens: Tensor  # [B, D_path] int32, drawn tokens; the last one is the bonus token
    finish: Tensor  # [B] int32: 0 none, 1 stop, 2 length, 3 no draw


@dataclass(frozen=True, slots=True)
class Draws:
    """Settings of the draws and of the walk, a row each."""

    temperature: Tensor  # [B] float32; 0: greedy
    top_k: Tensor  # [B] int32; 0: no filter
    top_p: Tensor  # [B] float64
    min_p: Tensor  # [B] float64
    seeds: Tensor  # [B] int64, the bits of the unsigned seed
    stop_ids: Tensor  # [B, MAX_STOP_IDS] int32, -1 for padding
    remaining: Tensor  # [B] int32, tokens that may still be generated


class Arena:
    """The stash and the logits of the largest bucket, of which smaller ones use the beginning."""

    def __init__(self, spec: TargetSpec, num_nodes: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """`num_nodes` of all sequences together."""
        self.spec, self.num_nodes = spec, num_nodes
        shape, r = spec.recurrent or NO_RECURRENCE, spec.num_recurrent_layers
        row = (spec.num_attention_layers, (spec.num_kv_heads, spec.head_dim), dtype)
        self._parts: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {
            "keys": row,
            "values": row,
            "inputs": (r, (shape.channels,), dtype),
            "conv": (r, (shape.channels if shape.value_dim else 0,), dtype),
            "norms": (r, (2 * shape.num_key_heads,), torch.float32),
            "g": (r, (shape.num_value_heads,), torch.float32),
            "beta": (r, (shape.num_value_heads,), torch.float32),
        }
        self._storage = {
            name: torch.zeros(layers * num_nodes * int(np.prod(size)), dtype=kind, device=device)
            for name, (layers, size, kind) in self._parts.items()
        }
        self.hidden = torch.zeros(num_nodes, spec.hidden_size, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(t.nbytes for t in (*self._storage.values(), self.hidden))

    def stash(self, b: int, n: int) -> Stash:
        """The stash of a bucket."""
        parts: dict[str, Tensor] = {}
        for name, (layers, size, _) in self._parts.items():
            count = layers * b * n * int(np.prod(size))
            parts[name] = self._storage[name][:count].view(layers, b, n, *size)
        return Stash(**parts)


class StepBuffers:
    """One bucket's: B rows of N nodes."""

    def __init__(
        self,
        b: int,
        n: int,
        *,
        arena: Arena,
        page_table: Tensor,  # [max batch, P] int32 on the device
        max_path: int,
    ) -> None:
        self.b, self.n, self.max_path = b, n, max_path
        device, i32, f32 = page_table.device, torch.int32, torch.float32
        self.inputs = Staging(
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
        words = -(-n // NODES_A_WORD)

        def new(*size: int, dtype: torch.dtype = i32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.structure = Structure(
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
        self.draws = Draws(**{name: of[name] for name in Draws.__dataclass_fields__})
        self.input_ids = of["input_ids"]
        self.drawn = new(b, n)  # the token drawn at each node, -1 where its logits are no distribution
        rows, each = ((b, max_path), i32), ((b,), i32)
        self.result = Staging({"path": rows, "tokens": rows, "path_length": each, "finish": each}, device)
        self.outcome = Outcome(**self.result.device)
        self.stash = arena.stash(b, n)
        self.hidden = arena.hidden[: b * n].view(b, n, -1)

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

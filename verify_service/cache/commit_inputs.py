"""What a pass leaves for the commit, and the memory that passes of all shapes share for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from verify_service.core.target_spec import GDN, NO_RECURRENCE, TargetSpec


@dataclass(frozen=True, slots=True)
class CommitInputs:
    """Rows of all attention layers, and the per-token inputs of all recurrent layers, which a commit replays along the
    accepted path. K of Gated DeltaNet is normalised through `norms`; Mamba2 has none. Valid until the next pass."""

    keys: Tensor  # [A, B, N, HKV, D], rotated
    values: Tensor  # [A, B, N, HKV, D]
    inputs: Tensor  # [R, B, N, C], before the convolution
    conv: Tensor  # [R, B, N, C], after it: q | k | v of Gated DeltaNet, x | B | C of Mamba2
    norms: Tensor  # [R, B, N, 2 HK] float32: 1 / |q|, 1 / |k|
    g: Tensor  # [R, B, N, HV] float32, log decay
    beta: Tensor  # [R, B, N, HV] float32: Gated DeltaNet's beta, Mamba2's time step

    def rows(self) -> CommitInputs:
        """The same with B and N as one dimension M."""
        return CommitInputs(*(getattr(self, part.name).flatten(1, 2) for part in fields(self)))


class Arena:
    """Memory for the commit inputs of `num_nodes`, of all sequences together; smaller passes use the beginning. Each
    pass overwrites what the last one left."""

    def __init__(self, spec: TargetSpec, num_nodes: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.num_nodes = num_nodes
        shape, r = spec.recurrent or NO_RECURRENCE, spec.num_recurrent_layers
        row = (spec.num_attention_layers, (spec.num_kv_heads, spec.head_dim), dtype)
        heads = (r, (shape.num_value_heads,), torch.float32)
        parts: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {
            "keys": row,
            "values": row,
            "inputs": (r, (shape.channels,), dtype),
            "conv": (r, (shape.channels if shape.value_dim else 0,), dtype),
            "norms": (r, (2 * shape.num_key_heads if shape.kind == GDN else 0,), torch.float32),
            "g": heads,
            "beta": heads,
        }
        self._parts = {
            name: (layers, size, torch.zeros(layers * num_nodes * math.prod(size), dtype=kind, device=device))
            for name, (layers, size, kind) in parts.items()
        }

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for _, _, memory in self._parts.values())

    def commit_inputs(self, b: int, n: int) -> CommitInputs:
        """Those of a pass over B trees of N nodes."""
        return CommitInputs(
            **{
                name: memory[: layers * b * n * math.prod(size)].view(layers, b, n, *size)
                for name, (layers, size, memory) in self._parts.items()
            }
        )

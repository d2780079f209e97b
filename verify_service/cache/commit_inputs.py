"""What a pass leaves for the commit, and the memory that passes of all shapes share for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verify_service.core.target_spec import NO_RECURRENCE, TargetSpec


@dataclass(frozen=True, slots=True)
class CommitInputs:
    """What one pass leaves for the commit. K of GDN is normalised through `norms`; Mamba2 has none."""

    keys: Tensor  # [A, B, N, HKV, D], rotated
    values: Tensor  # [A, B, N, HKV, D]
    inputs: Tensor  # [R, B, N, C], before the convolution
    conv: Tensor  # [R, B, N, C], after it
    norms: Tensor  # [R, B, N, 2 HK] float32: 1 / |q|, 1 / |k|
    g: Tensor  # [R, B, N, HV] float32, log decay
    beta: Tensor  # [R, B, N, HV] float32: GDN's beta, Mamba2's time step


class Arena:
    """The commit inputs and the logits of the largest bucket, of which smaller ones use the beginning."""

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

    def commit_inputs(self, b: int, n: int) -> CommitInputs:
        """The commit inputs of a bucket."""
        parts: dict[str, Tensor] = {}
        for name, (layers, size, _) in self._parts.items():
            count = layers * b * n * int(np.prod(size))
            parts[name] = self._storage[name][:count].view(layers, b, n, *size)
        return CommitInputs(**parts)

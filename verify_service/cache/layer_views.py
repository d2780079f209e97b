"""What each layer of a pass sees of the committed state, and where it leaves what a commit needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verify_service.cache.commit_inputs import CommitInputs
from verify_service.cache.pools import Pools
from verify_service.core.target_spec import ATTENTION, TargetSpec


@dataclass(frozen=True, slots=True)
class AttentionView:
    """One layer's committed rows, and where the pass leaves the nodes' own: they go into the pools on commit only."""

    key_pool: Tensor  # [HKV, S, D]
    value_pool: Tensor  # [HKV, S, D]
    keys: Tensor  # [B, N, HKV, D], written; here and below [M, ...] in passes over rows
    values: Tensor  # [B, N, HKV, D], written

    def written(self) -> tuple[Tensor, ...]:
        """Tensors whose first dimensions are those of the pass."""
        return self.keys, self.values


@dataclass(frozen=True, slots=True)
class RecurrentView:
    """One layer's committed state, and where the pass leaves what a commit needs. A short convolution has its window
    and inputs alone; the rest is empty."""

    states: Tensor  # [T, HV, V, K] float32
    windows: Tensor  # [T, kernel_size - 1, C]
    inputs: Tensor  # [B, N, C], written, as all below
    conv: Tensor  # [B, N, C]
    norms: Tensor  # [B, N, 2 HK] float32
    g: Tensor  # [B, N, HV] float32
    beta: Tensor  # [B, N, HV] float32

    def written(self) -> tuple[Tensor, ...]:
        return self.inputs, self.conv, self.norms, self.g, self.beta


LayerArguments = list[dict[str, Any]]  # for each layer, its views as keyword arguments


def layer_arguments(spec: TargetSpec, inputs: CommitInputs, pools: Pools) -> LayerArguments:
    """Each layer's views, by the names under which its mixers take them: `attention`, `recurrent`."""
    arguments: LayerArguments = []
    attention = recurrent = 0
    for mixers in spec.mixers:
        arguments.append({})
        if ATTENTION in mixers:
            parts = (pools.keys, pools.values, inputs.keys, inputs.values)
            arguments[-1]["attention"] = AttentionView(*(_own_storage(t[attention]) for t in parts))
            attention += 1
        if spec.is_recurrent(mixers):
            # Without a state there is none to take a layer's part of.
            states = pools.states[recurrent] if pools.states.numel() else pools.states
            parts = (pools.windows, inputs.inputs, inputs.conv, inputs.norms, inputs.g, inputs.beta)
            arguments[-1]["recurrent"] = RecurrentView(
                _own_storage(states), *(_own_storage(t[recurrent]) for t in parts)
            )
            recurrent += 1
    return arguments


def _own_storage(part: Tensor) -> Tensor:
    """The same memory under a storage of its own. Offsets into a common storage grow with the sizes that vary, and
    compiled graphs would be guarded by how the layers' offsets relate."""
    return torch.from_dlpack(part) if part.numel() else part.new_empty(part.shape)

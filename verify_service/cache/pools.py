"""The tensors of committed state, allocated once: KV pools with feature rows beside them, states and windows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verify_service.cache.pages import PageAllocator, SlotAllocator
from verify_service.core.target_spec import NO_RECURRENCE, TargetSpec


@dataclass(frozen=True, slots=True)
class Pools:
    """S token slots, T state slots; slot 0 of either is scratch."""

    keys: Tensor  # [A, HKV, S, D]
    values: Tensor  # [A, HKV, S, D]
    features: Tensor  # [S, F] projected feature rows; F is 0 without a draft model
    states: Tensor  # [R, T, HV, V, K] float32; nothing for short convolutions
    windows: Tensor  # [R, T, kernel_size - 1, C], newest last

    def sizes(self) -> dict[str, int]:
        """Bytes by what they hold."""
        return {
            "KV pages": self.keys.nbytes + self.values.nbytes,
            "recurrent states": self.states.nbytes + self.windows.nbytes,
            "feature rows": self.features.nbytes,
        }


def allocate_pools(
    spec: TargetSpec,
    pages: PageAllocator,
    slots: SlotAllocator,
    feature_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Pools:
    """Zeroed pools of those pages and slots, and of a scratch page and slot; the operating system commits their memory
    as it is touched."""
    num_slots, num_states = (pages.num_pages + 1) * pages.page_size, slots.num_slots + 1
    attention = (spec.num_attention_layers, spec.num_kv_heads, num_slots, spec.head_dim)
    shape, layers = spec.recurrent or NO_RECURRENCE, spec.num_recurrent_layers
    state = (layers, num_states, shape.num_value_heads, shape.value_dim, shape.key_dim)
    return Pools(
        keys=torch.zeros(attention, device=device, dtype=dtype),
        values=torch.zeros(attention, device=device, dtype=dtype),
        features=torch.zeros(num_slots, feature_size, device=device, dtype=dtype),
        states=torch.zeros(state, device=device),
        windows=torch.zeros(layers, num_states, shape.conv_kernel_size - 1, shape.channels, device=device, dtype=dtype),
    )


def reset_slot(pools: Pools, state_slot: int) -> None:
    """Empties a state slot for a new sequence."""
    pools.states[:, state_slot].zero_()
    pools.windows[:, state_slot].zero_()

"""The attention function that transformers' attention layers call: paged prefix, ancestors, and what a commit needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from verify_service.cpu.step_inputs import StepInputs
from verify_service.kernels.reference.tree_attention import attention_over_tree

NAME = "draftwood_tree"


@dataclass(frozen=True, slots=True)
class AttentionView:
    """One layer's committed rows, and where the pass leaves the nodes' own: they go into the pools on commit only."""

    key_pool: Tensor  # [HKV, S, D]
    value_pool: Tensor  # [HKV, S, D]
    keys: Tensor  # [B, HKV, N, D], written
    values: Tensor  # [B, HKV, N, D], written

    def varying(self) -> list[tuple[Tensor, list[int]]]:
        """Tensors with the dimensions that vary from step to step."""
        return [(self.keys, [0, 2]), (self.values, [0, 2])]


def attend(
    module: nn.Module,
    query: Tensor,  # [B, HQ, N, D], rotated
    key: Tensor,  # [B, HKV, N, D], rotated
    value: Tensor,  # [B, HKV, N, D]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [HQ] sink scores
    *,
    step: StepInputs,
    attention: AttentionView,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attends to the committed prefix and to the node's ancestors."""
    del module, attention_mask, dropout
    out = attention_over_tree(
        query,
        key,
        value,
        attention.key_pool,
        attention.value_pool,
        step.prefix_slots,
        step.prefix_bias,
        step.ancestor_bias,
        step.positions,
        scaling if scaling is not None else query.shape[-1] ** -0.5,
        sliding_window,
        softcap,
        s_aux,
    )
    attention.keys.copy_(key)
    attention.values.copy_(value)
    return out, None


AttentionInterface.register(NAME, attend)

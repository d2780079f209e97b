"""The attention function that transformers' attention layers call: paged prefix, ancestors, and the KV write."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from verify_service.kernels.tree_attention import tree_attention
from verify_service.step import StepInputs

NAME = "draftwood_tree"


def attend(
    module: nn.Module,
    query: Tensor,  # [B, HQ, N, D], rotated
    key: Tensor,  # [B, HKV, N, D], rotated
    value: Tensor,  # [B, HKV, N, D]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    *,
    step: StepInputs,
    kv: tuple[Tensor, Tensor],  # this layer's pools, each [HKV, S, D]
    **_: Any,
) -> tuple[Tensor, None]:
    """Attends to the committed prefix and the node's ancestors, and puts the nodes' rows into the pools."""
    del module, attention_mask, dropout
    key_pool, value_pool = kv
    out = tree_attention(
        query,
        key,
        value,
        key_pool,
        value_pool,
        step.prefix_slots,
        step.prefix_bias,
        step.off_path,
        step.positions,
        scaling if scaling is not None else query.shape[-1] ** -0.5,
        sliding_window,
    )
    b, hkv, n, d = key.shape
    key_pool.index_copy_(1, step.node_slots, key.transpose(0, 1).reshape(hkv, b * n, d))
    value_pool.index_copy_(1, step.node_slots, value.transpose(0, 1).reshape(hkv, b * n, d))
    return out, None


AttentionInterface.register(NAME, attend)

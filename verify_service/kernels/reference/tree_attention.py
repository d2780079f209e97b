"""Attention of tree nodes over a paged prefix and their own ancestors.

The prefix part and the tree part of a row share one softmax. The prefix needs one bias per key, the tree part one per
pair of nodes; no mask has size nodes x context (a sliding window compares positions instead).
"""

from __future__ import annotations

import torch
from torch import Tensor

from verify_service.kernels.arguments import AttentionSettings, KvPages, TreeMetadata
from verify_service.kernels.reference.tree_metadata import ancestor_masks


def attention_over_tree(
    query: Tensor,  # [B, HQ, N, D], rotated
    key: Tensor,  # [B, HKV, N, D], rotated
    value: Tensor,  # [B, HKV, N, D]
    key_pool: Tensor,  # [HKV, S, D]
    value_pool: Tensor,  # [HKV, S, D]
    prefix_slots: Tensor,  # [B, L] int64, pool rows of positions 0, 1, ...
    prefix_bias: Tensor,  # [B, L] float32: 0 for committed positions, -inf for padding
    ancestor_bias: Tensor,  # [B, N, N] float32: 0 where j is i or its ancestor, else -inf
    positions: Tensor,  # [B, N] int64
    scaling: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,  # [HQ]
) -> Tensor:  # [B, N, HQ, D]
    """Softmax attention; key j of the prefix is seen by node i if positions[i] - j < sliding_window.

    `soft_cap` bounds the scores before the masks, cap * tanh(score / cap) (Gemma 2, arXiv 2408.00118). A head's sink is
    the score of one more key that everybody sees and that has no value: weights sum to less than 1 (gpt-oss).
    """
    b, hq, n, d = query.shape
    hkv, length = key.shape[1], prefix_slots.shape[1]
    group = hq // hkv
    flat = prefix_slots.reshape(-1)
    prefix_key = key_pool.index_select(1, flat).view(hkv, b, length, d).transpose(0, 1)
    prefix_value = value_pool.index_select(1, flat).view(hkv, b, length, d).transpose(0, 1)
    # Rows are packed as (query head in group, node), so that a KV head's keys are read once.
    rows = (query * scaling).reshape(b, hkv, group * n, d)
    prefix = torch.matmul(rows, prefix_key.transpose(2, 3)).float().view(b, hkv, group, n, length)
    tree = torch.matmul(rows, key.transpose(2, 3)).float().view(b, hkv, group, n, n)
    if soft_cap is not None:
        prefix, tree = (soft_cap * torch.tanh(scores / soft_cap) for scores in (prefix, tree))
    tree = tree + ancestor_bias[:, None, None]
    prefix = prefix + prefix_bias[:, None, None, None]
    if sliding_window is not None:
        columns = torch.arange(length, device=query.device)
        hidden = positions[:, :, None] - columns >= sliding_window
        prefix = prefix.masked_fill(hidden[:, None, None], -torch.inf)
        # A node is as far from its ancestor as their depths are apart.
        far = positions[:, :, None] - positions[:, None, :] >= sliding_window
        tree = tree.masked_fill(far[:, None, None], -torch.inf)
    scores = [prefix, tree]
    if sinks is not None:
        scores.append(sinks.float().view(1, hkv, group, 1, 1).expand(b, hkv, group, n, 1))
    weights = torch.cat(scores, -1).softmax(-1).to(value.dtype).view(b, hkv, group * n, -1)
    out = torch.matmul(weights[..., :length], prefix_value) + torch.matmul(weights[..., length : length + n], value)
    return out.view(b, hq, n, d).transpose(1, 2)


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, pages: KvPages, tree: TreeMetadata, settings: AttentionSettings, out: Tensor
) -> None:
    """Pages become slots, bitsets a mask. In place of what is not committed slot 0 is read, which must be finite."""
    at = torch.arange(max(int(tree.base_lengths.max()), 1), device=q.device)
    committed = at < tree.base_lengths[:, None]
    slots = tree.page_table[:, at // pages.page_size].long() * pages.page_size + at % pages.page_size
    prefix_bias = torch.zeros(committed.shape, device=q.device).masked_fill_(~committed, -torch.inf)
    _, ancestor_bias = ancestor_masks(tree.ancestors)
    query, key, value = (t.transpose(1, 2) for t in (q, k, v))
    prefix = (pages.keys, pages.values, torch.where(committed, slots, 0), prefix_bias)
    scoring = (settings.scaling, settings.sliding_window, settings.soft_cap, settings.sinks)
    out.copy_(attention_over_tree(query, key, value, *prefix, ancestor_bias, tree.positions, *scoring))

"""Commit of KV rows: the accepted nodes' rows go into the pools, all attention layers in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.errors import UnsupportedModelError


@triton.jit(do_not_specialize=["P"])
def _copy(
    stash_keys, stash_values, path, path_length, base_lengths, page_table, key_pool, value_pool, S, P,
    B: tl.constexpr, N: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, LONGEST: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (step of the path, row of the batch, layer)."""
    step, b, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if step >= tl.load(path_length + b):
        return
    node = tl.load(path + b * LONGEST + step)
    position = tl.load(base_lengths + b) + step
    slot = tl.load(page_table + b * P + position // PAGE).to(tl.int64) * PAGE + position % PAGE
    at = tl.arange(0, BLOCK)
    inside = at < HKV * D
    source = ((layer * B + b) * N + node) * (HKV * D) + at
    target = ((layer * HKV + at // D) * S + slot) * D + at % D
    K = tl.load(stash_keys + source, mask=inside)
    V = tl.load(stash_values + source, mask=inside)
    tl.store(key_pool + target, K, mask=inside)
    tl.store(value_pool + target, V, mask=inside)


def kv_commit(
    stash_keys: Tensor,  # [A, B, N, HKV, D], rotated
    stash_values: Tensor,  # [A, B, N, HKV, D]
    path: Tensor,  # [B, D_path] int32, nodes, root first
    path_length: Tensor,  # [B] int32, nodes to commit; 0: none
    base_lengths: Tensor,  # [B] int32, committed tokens before
    page_table: Tensor,  # [B, P] int32
    page_size: int,
    key_pool: Tensor,  # [A, HKV, S, D], written
    value_pool: Tensor,  # [A, HKV, S, D], written
) -> None:
    """Copies the rows of path[0], path[1], … to positions base, base + 1, …; they were rotated for just these.

    Raises:
        UnsupportedModelError: a tensor is not contiguous, or has another dtype than its pool.
    """
    _check(stash_keys, stash_values, key_pool, value_pool)
    layers, b, n, hkv, d = stash_keys.shape
    longest = path.shape[1]
    if layers == 0:
        return
    _copy[(longest, b, layers)](
        stash_keys, stash_values, path, path_length, base_lengths, page_table, key_pool, value_pool,
        key_pool.shape[2], page_table.shape[1], B=b, N=n, HKV=hkv, D=d, LONGEST=longest, PAGE=page_size,
        BLOCK=triton.next_power_of_2(hkv * d), num_warps=4,
    )  # fmt: skip


def kv_commit_plain(
    stash_keys: Tensor,  # [A, B, N, HKV, D]
    stash_values: Tensor,  # [A, B, N, HKV, D]
    path: Tensor,  # [B, D_path] int32
    path_length: Tensor,  # [B] int32
    base_lengths: Tensor,  # [B] int32
    page_table: Tensor,  # [B, P] int32
    page_size: int,
    key_pool: Tensor,  # [A, HKV, S, D], written
    value_pool: Tensor,  # [A, HKV, S, D], written
) -> None:
    """The same in plain PyTorch, a row of the batch at a time."""
    for b, length in enumerate(path_length.tolist()):
        positions = base_lengths[b].long() + torch.arange(length, device=path.device)
        slots = page_table[b].long()[positions // page_size] * page_size + positions % page_size
        nodes = path[b, :length].long()
        key_pool.index_copy_(2, slots, stash_keys[:, b].index_select(1, nodes).transpose(1, 2))
        value_pool.index_copy_(2, slots, stash_values[:, b].index_select(1, nodes).transpose(1, 2))


def _check(stash_keys: Tensor, stash_values: Tensor, key_pool: Tensor, value_pool: Tensor) -> None:
    """Limits of the kernel, named."""
    tensors = (stash_keys, stash_values, key_pool, value_pool)
    if not all(t.is_contiguous() for t in tensors):
        raise UnsupportedModelError("commit_inputs and pools of keys and values must be contiguous", field="strides")
    if len({t.dtype for t in tensors}) > 1:
        raise UnsupportedModelError(f"dtypes {[str(t.dtype) for t in tensors]} must be one", field="dtype")

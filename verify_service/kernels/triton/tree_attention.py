"""Attention of tree nodes over a paged prefix and their own ancestors, in two launches.

A row is one query head of one node; the rows of a KV head's group are packed node-major, so that its keys are read once
for all of them. The keys of a row of the batch (prefix, then tree) are cut into slices to fill the GPU; slices leave
float32 partial outputs with their log-sum-exp, and a second launch merges them. No mask has size nodes x context.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.errors import UnsupportedModelError
from verify_service.kernels.arguments import NODES_PER_WORD, AttentionSettings, KvPages, TreeMetadata
from verify_service.kernels.triton.attention_tiling import (
    Tiling,
    can_have_descriptor,
    choose_tiling,
    descriptor_of,
    gpu_of,
)
from verify_service.kernels.triton.key_tiles import (
    fetch_nodes,
    fetch_rows,
    first_row,
    key_slice,
    online_softmax_update,
    pages_of,
    prefetch_rows,
    scores_of,
    store_partial,
)
from verify_service.kernels.triton.launch import overlaps, require, wait_for_inputs, wait_for_kernels

LOG2E = 1.4426950408889634
LARGEST_HEAD = 256
FEW_ROWS = 512  # merged one per program
MERGED = 8192  # partial results that a program merges, at most


@triton.jit(do_not_specialize=["P"])
def _attend(
    q, k, v, key_pool, value_pool, k_descriptor, v_descriptor, key_descriptor, value_descriptor,
    page_table, base_lengths, ancestors, positions, sinks, partial, sums, out, factor, unit, cap, slots, P,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, out_b, out_n, out_h,
    N: tl.constexpr, W: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PAGE: tl.constexpr, DESCRIPTORS: tl.constexpr, NODE_DESCRIPTORS: tl.constexpr, PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SINKS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, EDGE: tl.constexpr, SLICES: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Program (row tile within KV head, slice, row of the batch): whole tiles of the prefix, which need no mask unless
    there is a window, then its last and partial one, then the tree's."""
    G: tl.constexpr = HQ // HKV
    ROW_TILES: tl.constexpr = (N * G + ROWS - 1) // ROWS
    wait_for_inputs(OVERLAP)
    head = tl.program_id(0) // ROW_TILES
    tile = tl.program_id(0) % ROW_TILES
    index, b = tl.program_id(1), tl.program_id(2)
    length = tl.load(base_lengths + b)
    first, prefix, low, high, used = key_slice(length, index, WINDOW, N, KEYS, SLICES, LEAST)
    if index >= used:
        return
    rows = tile * ROWS + tl.arange(0, ROWS)
    node, query_head = rows // G, head * G + rows % G
    real = node < N
    d = tl.arange(0, DP)
    q_at = b.to(tl.int64) * q_b + node[:, None] * q_n + query_head[:, None] * q_h + d[None, :]
    queries = tl.load(q + q_at, mask=real[:, None] & (d < D)[None, :], other=0.0)
    position = node
    if WINDOW > 0:
        position = tl.load(positions + b * N + node, mask=real, other=0).to(tl.int32)
    top = tl.full([ROWS], -1.0e30, tl.float32)  # finite: a tile may be out of sight as a whole
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    table = page_table + b * P
    pool_at = head.to(tl.int64) * slots

    # Whole tiles of the prefix. A tile's page is fetched one tile ahead, and its rows go into L2 two tiles ahead.
    column = tl.arange(0, KEYS)
    whole = tl.minimum(first + high, length // KEYS)
    start = tl.minimum(first + low, whole)
    page = pages_of(table, start, P, PAGE, KEYS)
    ahead = pages_of(table, start + 2, P, PAGE, KEYS)
    for t in range(start, whole):
        row = pool_at + first_row(page, t, PAGE, KEYS)
        page = pages_of(table, t + 1, P, PAGE, KEYS)
        if PREFETCH:
            row_ahead = pool_at + first_row(ahead, t + 2, PAGE, KEYS)
            ahead = pages_of(table, t + 3, P, PAGE, KEYS)
            prefetch_rows(key_pool, row_ahead, KEYS, D)
            prefetch_rows(value_pool, row_ahead, KEYS, D)
        scores = scores_of(
            queries, fetch_rows(key_pool, key_descriptor, row, PAGE, KEYS, D, DP, DESCRIPTORS), factor, cap, SOFT_CAP
        )
        if WINDOW > 0:
            near = position[:, None] - (t * KEYS + column)[None, :] < WINDOW
            scores = tl.where(near, scores, float("-inf"))
        values = fetch_rows(value_pool, value_descriptor, row, PAGE, KEYS, D, DP, DESCRIPTORS)
        acc, top, total = online_softmax_update(acc, top, total, scores, values, unit)

    # The partial tile at the end of the prefix: what is beyond it in the page may be anything.
    has_rest = (low < prefix) & (high >= prefix) & (length % KEYS > 0)
    for t in range(whole, tl.where(has_rest, whole + 1, whole)):
        row = pool_at + first_row(page, t, PAGE, KEYS)
        scores = scores_of(
            queries, fetch_rows(key_pool, key_descriptor, row, PAGE, KEYS, D, DP, DESCRIPTORS), factor, cap, SOFT_CAP
        )
        key = t * KEYS + column
        scores = tl.where((key < length)[None, :], scores, float("-inf"))
        if WINDOW > 0:
            scores = tl.where(position[:, None] - key[None, :] < WINDOW, scores, float("-inf"))
        values = fetch_rows(value_pool, value_descriptor, row, PAGE, KEYS, D, DP, DESCRIPTORS)
        acc, top, total = online_softmax_update(
            acc, top, total, scores, tl.where((key < length)[:, None], values, 0.0), unit
        )

    # The tree, up to this tile's last node: a parent comes before its children.
    words = ancestors + (b * N + node) * W
    tree_end = tl.minimum((high - prefix) * KEYS, tl.minimum((tile * ROWS + ROWS - 1) // G + 1, N))
    for j in range(tl.maximum(low - prefix, 0) * KEYS, tree_end, EDGE):
        keys = fetch_nodes(k, k_descriptor, b, j, head, k_b, k_n, k_h, N, EDGE, D, DP, NODE_DESCRIPTORS)
        scores = scores_of(queries, keys, factor, cap, SOFT_CAP)
        other = j + tl.arange(0, EDGE)
        bits = tl.load(words + j // 64, mask=real, other=0)
        bit = other % 64  # of halves of a word: a tile of int64 would not fit the registers
        half = tl.where((bit < 32)[None, :], bits.to(tl.int32)[:, None], (bits >> 32).to(tl.int32)[:, None])
        visible = ((half >> (bit % 32)[None, :]) & 1) != 0
        if WINDOW > 0:
            there = tl.load(positions + b * N + other, mask=other < N, other=0).to(tl.int32)
            visible = visible & (position[:, None] - there[None, :] < WINDOW)
        values = fetch_nodes(v, v_descriptor, b, j, head, v_b, v_n, v_h, N, EDGE, D, DP, NODE_DESCRIPTORS)
        acc, top, total = online_softmax_update(acc, top, total, tl.where(visible, scores, float("-inf")), values, unit)
    store_partial(acc, top, total, sinks, partial, sums, out, b, index, used, node, query_head, real,
           out_b, out_n, out_h, N, HQ, D, DP, SINKS, SLICES)  # fmt: skip


@triton.jit
def _merge(
    partial, sums, base_lengths, out, out_b, out_n, out_h,
    N: tl.constexpr, HQ: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr,
    SLICES: tl.constexpr, SP: tl.constexpr, LEAST: tl.constexpr, OVERLAP: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (rows of nodes' query heads, chunk of D, row of the batch): slices by their share of the weights."""
    b = tl.program_id(2)
    _, _, _, _, used = key_slice(tl.load(base_lengths + b), 0, WINDOW, N, KEYS, SLICES, LEAST)
    if used == 1:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    index = tl.arange(0, SP)
    d = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    at = (b * SLICES + index[None, :]) * (N * HQ) + row[:, None]
    inside = (row < N * HQ)[:, None] & (index < used)[None, :]
    part = partial + at.to(tl.int64)[:, :, None] * D + d[None, None, :]
    wait_for_kernels(OVERLAP)
    logs = tl.load(sums + at, mask=inside, other=-1.0e30)
    parts = tl.load(part, mask=inside[:, :, None] & (d < D)[None, None, :], other=0.0)
    shares = tl.exp2(logs - tl.max(logs, 1)[:, None])
    shares = shares / tl.sum(shares, 1)[:, None]
    result = tl.sum(parts * shares[:, :, None], 1)
    to = out + b.to(tl.int64) * out_b + (row // HQ * out_n + row % HQ * out_h)[:, None] + d[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=(row < N * HQ)[:, None] & (d < D)[None, :])


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: KvPages,
    tree: TreeMetadata,
    settings: AttentionSettings,
    out: Tensor,
    *,
    tiling: Tiling | None = None,
) -> None:
    """A row's result depends on its own inputs, on the shapes and on `tiling` (which tests give), never on what else
    is in the batch; batch buckets differ in their slices, and so in the last bits."""
    b, n, hq, d = q.shape
    hkv, slots, _ = pages.keys.shape
    _check(q, k, v, pages, out)
    if tiling is None:
        tiling = choose_tiling(b, n, hq, hkv, d, q.dtype, gpu_of(q.device))
    depth, slices, keys = triton.next_power_of_2(d), tiling.slices, tiling.keys
    edge = min(keys, NODES_PER_WORD)
    partial = torch.empty(b, slices, n, hq, d, dtype=torch.float32, device=q.device) if slices > 1 else out
    sums = torch.empty(b, slices, n, hq, dtype=torch.float32, device=q.device) if slices > 1 else out
    factor, soft_cap, sinks = settings.scaling * LOG2E, settings.soft_cap, settings.sinks
    unit, cap = factor, 0.0
    if soft_cap is not None:
        factor, unit, cap = 2.0 * settings.scaling / soft_cap * LOG2E, 1.0, soft_cap * LOG2E
    has_descriptors = tiling.descriptors and pages.page_size % keys == 0 and d == depth
    pools = [pages.keys, pages.values]
    if has_descriptors:
        pools = [descriptor_of(pool.view(-1, d), [keys, depth]) for pool in pools]
    has_node_descriptors = has_descriptors and can_have_descriptor(k) and can_have_descriptor(v)
    nodes = [descriptor_of(t.flatten(2), [1, edge, depth]) if has_node_descriptors else t for t in (k, v)]
    overlap = tiling.overlap and overlaps(q.device)
    cut = {"N": n, "HQ": hq, "D": d, "WINDOW": settings.sliding_window or 0, "KEYS": keys, "SLICES": slices}
    cut |= {"LEAST": tiling.least_keys, "OVERLAP": overlap} | ({"launch_pdl": True} if overlap else {})
    _attend[(triton.cdiv(n * hq // hkv, tiling.rows) * hkv, slices, b)](
        q, k, v, pages.keys, pages.values, *nodes, *pools, tree.page_table, tree.base_lengths, tree.ancestors,
        tree.positions, q if sinks is None else sinks, partial, sums, out, factor, unit, cap, slots,
        tree.page_table.shape[1], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        **cut, W=tree.ancestors.shape[2], HKV=hkv, DP=depth, PAGE=pages.page_size, DESCRIPTORS=has_descriptors,
        NODE_DESCRIPTORS=has_node_descriptors, PREFETCH=has_descriptors and tiling.prefetch and q.is_cuda,
        SOFT_CAP=soft_cap is not None, SINKS=sinks is not None, ROWS=tiling.rows, EDGE=edge, num_warps=tiling.warps,
        num_stages=tiling.stages,
    )  # fmt: skip
    if slices > 1:
        padded = triton.next_power_of_2(slices)
        chunk = min(depth, max(MERGED // padded, 16))
        rows = max(1, MERGED // (padded * chunk)) if b * n * hq > FEW_ROWS else 1
        _merge[(triton.cdiv(n * hq, rows), triton.cdiv(d, chunk), b)](
            partial, sums, tree.base_lengths, out, *out.stride()[:3], **cut, SP=padded, ROWS=rows, CHUNK=chunk,
            num_warps=4,
        )  # fmt: skip


def _check(q: Tensor, k: Tensor, v: Tensor, pages: KvPages, out: Tensor) -> None:
    hq, d, hkv, page_size = q.shape[2], q.shape[3], pages.keys.shape[0], pages.page_size
    is_taken = d <= LARGEST_HEAD and d % 16 == 0
    require(is_taken, "head_dim", f"head size {d}: must be a multiple of 16, at most {LARGEST_HEAD}")
    require(hq % hkv == 0, "num_key_value_heads", f"{hq} query heads over {hkv} KV heads do not divide")
    require(page_size >= 16, "page_size", f"page size {page_size}: must be at least 16")
    tensors = (q, k, v, pages.keys, pages.values, out)
    if len({t.dtype for t in tensors}) > 1 or q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        dtypes = [str(t.dtype) for t in tensors]
        raise UnsupportedModelError(f"dtypes {dtypes}: must be one of bfloat16, float16, float32", field="dtype")
    is_dense = pages.keys.is_contiguous() and pages.values.is_contiguous() and all(t.stride(-1) == 1 for t in tensors)
    require(is_dense, "strides", "rows of heads and pools must be contiguous")

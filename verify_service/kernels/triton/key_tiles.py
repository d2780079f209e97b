"""Tiles of keys and values: which of them a slice has, how they come from pages or from the tree's nodes, and the
softmax over them in one pass: scores, running sums, and the partial results of slices."""

from __future__ import annotations

import triton
import triton.language as tl

from verify_service.kernels.triton.matmul import matmul


@triton.jit
def key_slice(length, index, WINDOW: tl.constexpr, N: tl.constexpr, KEYS: tl.constexpr, SLICES: tl.constexpr,
           LEAST: tl.constexpr):  # fmt: skip
    """First key tile of the prefix, tiles of the prefix after it, tiles [low, high) of slice `index`, slices in use.

    The same for all tiles of rows: it depends on the committed length and constants alone.
    """
    first = 0
    if WINDOW > 0:  # nobody sees further back than the root
        first = tl.maximum(length - WINDOW + 1, 0) // KEYS
    prefix = tl.cdiv(length, KEYS) - first
    tiles = prefix + (N + KEYS - 1) // KEYS
    each = tl.maximum(tl.cdiv(tiles, SLICES), (LEAST + KEYS - 1) // KEYS)
    low = tl.minimum(index * each, tiles)
    return first, prefix, low, tl.minimum(low + each, tiles), tl.cdiv(tiles, each)


@triton.jit
def pages_of(table, tile, P, PAGE: tl.constexpr, KEYS: tl.constexpr):
    """The page of a tile of keys, or the page of each of its keys."""
    if PAGE % KEYS == 0:
        return tl.load(table + tl.minimum(tile * KEYS // PAGE, P - 1)).to(tl.int64)
    else:
        at = (tile * KEYS + tl.arange(0, KEYS)) // PAGE
        return tl.load(table + tl.minimum(at, P - 1)).to(tl.int64)


@triton.jit
def first_row(page, tile, PAGE: tl.constexpr, KEYS: tl.constexpr):
    """The slot of a tile's first key, or the slots of all."""
    if PAGE % KEYS == 0:
        return page * PAGE + (tile * KEYS) % PAGE
    else:
        return page * PAGE + (tile * KEYS + tl.arange(0, KEYS)) % PAGE


@triton.jit
def fetch_rows(pool, descriptor, row, PAGE: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
           DESCRIPTORS: tl.constexpr):  # fmt: skip
    """[KEYS, DP] rows of a pool: a tile that the copy engine fetches, or row by row."""
    if DESCRIPTORS:
        return descriptor.load([row.to(tl.int32), 0])
    else:
        d = tl.arange(0, DP)
        if PAGE % KEYS == 0:
            row += tl.arange(0, KEYS)
        if D == DP:
            return tl.load(pool + row[:, None] * D + d[None, :])
        else:
            return tl.load(pool + row[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)


@triton.jit
def fetch_nodes(rows, descriptor, b, j, head, row_b, row_n, row_h, N: tl.constexpr, EDGE: tl.constexpr, D: tl.constexpr,
                 DP: tl.constexpr, DESCRIPTORS: tl.constexpr):  # fmt: skip
    """[EDGE, DP] rows of nodes j, j + 1, ..., zero beyond N."""
    if DESCRIPTORS:
        return descriptor.load([b, j, head * D]).reshape(EDGE, DP)
    else:
        node, d = j + tl.arange(0, EDGE), tl.arange(0, DP)
        at = b.to(tl.int64) * row_b + node[:, None] * row_n + head * row_h + d[None, :]
        return tl.load(rows + at, mask=(node < N)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def prefetch_rows(pool, row, KEYS: tl.constexpr, D: tl.constexpr):
    """Asks for a tile's rows to come into the L2 cache, 128 bytes per request."""
    LINE: tl.constexpr = 1024 // pool.dtype.element_ty.primitive_bitwidth
    at = pool + row * D + tl.arange(0, KEYS * D // LINE) * LINE
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], tl.int32, False, 1)


@triton.jit
def scores_of(queries, keys, factor, cap, SOFT_CAP: tl.constexpr):
    """Q K^T before `factor`, or, with a soft cap, cap * tanh(Q K^T * factor / cap), both to base 2 once scaled."""
    scores = tl.zeros([queries.shape[0], keys.shape[0]], tl.float32)
    scores = matmul(queries, tl.trans(keys), scores)
    if SOFT_CAP:
        scores = cap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * factor)))
    return scores


@triton.jit
def online_softmax_update(acc, top, total, scores, values, unit):
    """Takes a tile's scores and values into the running output, maximum and sum of weights (arXiv 1805.02867)."""
    higher = tl.maximum(top, tl.max(scores, 1) * unit)
    weights = tl.exp2(scores * unit - higher[:, None])
    decay = tl.exp2(top - higher)
    total = total * decay + tl.sum(weights, 1)
    acc = matmul(weights.to(values.dtype), values, acc * decay[:, None])
    return acc, higher, total


@triton.jit
def store_partial(
    acc, top, total, sinks, partial, sums, out, b, index, used, node, query_head, real, out_b, out_n, out_h,
    N: tl.constexpr, HQ: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SINKS: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Writes what a slice found, to its place at once if there is no other; a sink counts in the last slice, as a key
    without a value."""
    if SINKS:
        sink = tl.load(sinks + query_head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
        sink = tl.where(index == used - 1, sink, float("-inf"))
        higher = tl.maximum(top, sink)
        decay = tl.exp2(top - higher)
        total = total * decay + tl.exp2(sink - higher)
        acc = acc * decay[:, None]
        top = higher
    some = tl.where(total > 0.0, total, 1.0)
    acc = acc * (1.0 / some)[:, None]
    d = tl.arange(0, DP)
    store = real[:, None] & (d < D)[None, :]
    if SLICES == 1 or used == 1:
        at = b.to(tl.int64) * out_b + node[:, None] * out_n + query_head[:, None] * out_h + d[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=store)
    else:
        row = ((b * SLICES + index) * N + node) * HQ + query_head
        tl.store(partial + row.to(tl.int64)[:, None] * D + d[None, :], acc, mask=store)
        tl.store(sums + row, tl.where(total > 0.0, top + tl.log2(some), float("-inf")), mask=real)

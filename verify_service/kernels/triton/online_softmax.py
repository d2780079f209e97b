"""Softmax over tiles of keys, in one pass: scores, running sums, and the partial results of slices."""

from __future__ import annotations

import triton
import triton.language as tl

from verify_service.kernels.triton.matmul import matmul


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

"""Tiles of keys and values: which of them a slice has, and how they come from pages or from the tree's nodes."""

from __future__ import annotations

import triton
import triton.language as tl


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

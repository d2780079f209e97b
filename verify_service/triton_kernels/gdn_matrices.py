"""The matrices over pairs of nodes that a Gated DeltaNet layer's outputs are made of, for `gdn_verify`.

    A_ij = b_i e^(G_i - G_j) (k_i . k_j) [j proper ancestor of i]      P_ij = e^(G_i - G_j) (q_i . k_j) [or i itself]
    M = P (I + A)^-1 within a block of nodes, so that its outputs are   e^G_i S0 q_i + sum over j of M_ij R_j

(gdn_verify.py has R.) M (I + A) = P is solved by substitution over columns, from the last: blocks of 16 columns one after
the other, each with the inverse of its diagonal block, which rows of float32 products and sums give. Never by powers of
A, which on repeated keys lose what they cancel. Rows of M do not meet, so a node's outputs depend on its path alone.
Grams are of the rounded q and k, whose products are exact; their norms are applied afterwards.

More than 64 nodes go in blocks of 64: tile (r, c) holds P and A of block r over block c, and on the diagonal M and
(I + A)^-1. All are kept as three bfloat16 parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from verify_service.triton_kernels.launching import wait_for_inputs
from verify_service.triton_kernels.products import product, split


@triton.jit
def _path_sums(g, ancestors, nodes, N, HV: tl.constexpr, BT: tl.constexpr, BLOCKS: tl.constexpr):
    """G of some nodes: sums of g [., HV] over their ancestors and themselves."""
    total = tl.zeros([nodes.shape[0]], tl.float32)
    for block in tl.static_range(BLOCKS):
        bits = tl.load(ancestors + nodes * BLOCKS + block, mask=nodes < N, other=0)
        others = tl.arange(0, BT)
        step = tl.load(g + (block * BT + others) * HV, mask=block * BT + others < N, other=0.0)
        on_path = ((bits[:, None] >> others[None, :].to(tl.int64)) & 1) != 0
        total += tl.sum(tl.where(on_path, step[None, :], 0.0), 1)
    return total


@triton.jit
def _column(
    conv, norms, g, ancestors, q, k, nodes, total, first, block, N, C: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr,
    K: tl.constexpr, BT: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """16 columns of decayed grams, (e^(G_i - G_j) k_i . k_j |k_j|^-1 of proper ancestors, the same of q and all)."""
    others = block * BT + first + tl.arange(0, 16)
    is_other = others < N
    key = tl.load(conv + HK * K + others[None, :] * C + tl.arange(0, K)[:, None], mask=is_other[None, :], other=0.0)
    zeros = tl.zeros([BT, 16], tl.float32)
    kk, qk = product(k, key, zeros), product(q, key, zeros)
    norm = tl.load(norms + others * 2 * HK + HK, mask=is_other, other=0.0)
    before = _path_sums(g, ancestors, others, N, HV, BT, BLOCKS)
    bits = tl.load(ancestors + nodes * BLOCKS + block, mask=nodes < N, other=0)
    on_path = ((bits[:, None] >> (first + tl.arange(0, 16))[None, :].to(tl.int64)) & 1) != 0
    decay = tl.exp(tl.where(on_path, total[:, None] - before[None, :], float("-inf"))) * norm[None, :]
    return tl.where(nodes[:, None] == others[None, :], 0.0, decay * kk), decay * qk


@triton.jit
def _store_parts(matrix, x, first, BT: tl.constexpr):
    at = matrix + tl.arange(0, BT)[:, None] * BT + first + tl.arange(0, 16)[None, :]
    part1, part2, part3 = split(x)
    tl.store(at, part1)
    tl.store(at + BT * BT, part2)
    tl.store(at + 2 * BT * BT, part3)


@triton.jit
def _invert_diagonal(lower, inverse, BT: tl.constexpr):
    """Inverses of the 16 x 16 diagonal blocks of I + `lower` [BT, BT]: a lane holds a column, rows come in order."""
    lane = tl.arange(0, BT)
    block, column = lane // 16, lane % 16
    base = lower + block * 16 * BT + block * 16
    rows = (tl.where(column == 0, 1.0, 0.0),)
    for i in tl.static_range(1, 16):
        row = tl.where(column == i, 1.0, 0.0)
        for j in tl.static_range(0, i):
            row -= tl.load(base + i * BT + j) * rows[j]
        rows = rows + (row,)
    for i in tl.static_range(16):
        tl.store(inverse + block * 256 + i * 16 + column, rows[i])


@triton.jit
def _less(x, solved, lower, row, first, BT: tl.constexpr):
    """x - solved @ (16 x 16 block of `lower` at (row, first))."""
    at = lower + (row + tl.arange(0, 16))[:, None] * BT + first + tl.arange(0, 16)[None, :]
    return product(-solved, tl.load(at), x)


@triton.jit
def _times_inverse(x, inverse, block):
    at = inverse + block * 256 + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    return product(x, tl.load(at), tl.zeros_like(x))


@triton.jit
def _solve(matrix, p0, p1, p2, p3, lower, inverse, BT: tl.constexpr):
    """Stores P (I + lower)^-1 by parts, from columns of 16 of P; a block of 16 or 32 nodes has one or two."""
    if BT > 32:
        m3 = _times_inverse(p3, inverse, 3)
        _store_parts(matrix, m3, 48, BT)
        m2 = _times_inverse(_less(p2, m3, lower, 48, 32, BT), inverse, 2)
        _store_parts(matrix, m2, 32, BT)
        p1 = _less(_less(p1, m3, lower, 48, 16, BT), m2, lower, 32, 16, BT)
        p0 = _less(_less(p0, m3, lower, 48, 0, BT), m2, lower, 32, 0, BT)
    if BT > 16:
        m1 = _times_inverse(p1, inverse, 1)
        _store_parts(matrix, m1, 16, BT)
        p0 = _less(p0, m1, lower, 16, 0, BT)
    _store_parts(matrix, _times_inverse(p0, inverse, 0), 0, BT)


@triton.jit
def gdn_matrices_kernel(
    conv, norms, g, beta, ancestors, matrices, factors, scratch, N, scale, C: tl.constexpr, HK: tl.constexpr,
    HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BLOCKS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """grid (B HV, BLOCKS (BLOCKS + 1) / 2): a head's tile of BT x BT pairs of nodes."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    TILES: tl.constexpr = BLOCKS * (BLOCKS + 1) // 2
    hv = row % HV
    hk = hv // (HV // HK)
    first = row // HV * N
    conv += first * C + hk * K
    norms += first * 2 * HK + hk
    g += first * HV + hv
    ancestors += first * BLOCKS
    matrices += (row * TILES + tile) * 6 * BT * BT
    r = (tile >= 1).to(tl.int32) + (tile >= 3).to(tl.int32) + (tile >= 6).to(tl.int32)
    c = tile - r * (r + 1) // 2
    nodes = r * BT + tl.arange(0, BT)
    is_node = nodes < N
    at = conv + nodes[:, None] * C + tl.arange(0, K)[None, :]
    wait_for_inputs(OVERLAPS)
    q = tl.load(at, mask=is_node[:, None], other=0.0)
    k = tl.load(at + HK * K, mask=is_node[:, None], other=0.0)
    q_norm = tl.load(norms + nodes * 2 * HK, mask=is_node, other=0.0) * scale
    k_norm = tl.load(norms + nodes * 2 * HK + HK, mask=is_node, other=0.0)
    strength = tl.load(beta + (first + nodes) * HV + hv, mask=is_node, other=0.0)
    total = _path_sums(g, ancestors, nodes, N, HV, BT, BLOCKS)
    if tile == r * (r + 3) // 2:
        decay = tl.exp(total)
        own = factors + row * BLOCKS * BT * 3 + nodes
        tl.store(own, q_norm * decay)
        tl.store(own + BLOCKS * BT, strength)
        tl.store(own + 2 * BLOCKS * BT, k_norm * decay)
    left = (strength * k_norm)[:, None]
    lower = scratch + (row * TILES + tile) * (BT * BT + BT * 16)
    lower_at = lower + tl.arange(0, BT)[:, None] * BT + tl.arange(0, 16)[None, :]
    columns = ()
    for i in tl.static_range(BT // 16):
        a, p = _column(conv, norms, g, ancestors, q, k, nodes, total, i * 16, c, N, C, HK, HV, K, BT, BLOCKS)
        p = p * q_norm[:, None]
        if r == c:
            tl.store(lower_at + i * 16, a * left)
        else:
            _store_parts(matrices, p, i * 16, BT)
            _store_parts(matrices + 3 * BT * BT, a * left, i * 16, BT)
        columns = columns + (p,)
    if r == c:
        tl.debug_barrier()
        inverse = lower + BT * BT
        _invert_diagonal(lower, inverse, BT)
        tl.debug_barrier()
        LAST: tl.constexpr = BT // 16 - 1
        _solve(matrices, columns[0], columns[min(1, LAST)], columns[min(2, LAST)], columns[LAST], lower, inverse, BT)
        if BLOCKS > 1:
            same = tl.arange(0, BT)[:, None] - tl.arange(0, 16)[None, :]
            one = tl.where(same == 0, 1.0, 0.0)
            _solve(
                matrices + 3 * BT * BT, one, tl.where(same == 16, 1.0, 0.0), tl.where(same == 32, 1.0, 0.0),
                tl.where(same == 48, 1.0, 0.0), lower, inverse, BT,
            )  # fmt: skip

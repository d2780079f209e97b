"""The matrices over pairs of nodes that a Gated DeltaNet layer's outputs are made of, for `gdn_verify`.

    A_ij = b_i e^(G_i - G_j) (k_i . k_j) [j proper ancestor of i]      P_ij = e^(G_i - G_j) (q_i . k_j) [or i itself]
    M = P (I + A)^-1 within a block of nodes, so that its outputs are   e^G_i S0 q_i + sum over j of M_ij R_j

(gdn_verify.py has R.) M (I + A) = P is solved by substitution over columns, from the last: blocks of 16 columns one
after the other, each with the inverse of its diagonal block, whose rows come in turn in float32. Never by powers of A,
which on repeated keys lose what they cancel. Rows of M do not meet, so a node's outputs depend on its path alone. Grams
are of the rounded q and k, whose products are exact; their norms are applied afterwards.

More than 64 nodes go in blocks of 64: tile (r, c) holds P and A of block r over block c, and on the diagonal
(I + A)^-1 in the place of A. All are kept as three bfloat16 parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from verify_service.kernels.triton.launch import wait_for_inputs
from verify_service.kernels.triton.matmul import matmul, matmul_parts, split


@triton.jit
def _path_sums(g, ancestors, nodes, own, N, HV: tl.constexpr, BT: tl.constexpr, BLOCKS: tl.constexpr):
    """G of the nodes of block `own`: sums of g [., HV] over their ancestors and themselves."""
    total = tl.zeros([nodes.shape[0]], tl.float32)
    for block in range(own + 1):
        bits = tl.load(ancestors + nodes * BLOCKS + block, mask=nodes < N, other=0)
        others = tl.arange(0, BT)
        step = tl.load(g + (block * BT + others) * HV, mask=block * BT + others < N, other=0.0)
        on_path = ((bits[:, None] >> others[None, :].to(tl.int64)) & 1) != 0
        total += tl.sum(tl.where(on_path, step[None, :], 0.0), 1)
    return total


@triton.jit
def _halves(x):
    """Left and right columns of [., 2 n]; they are in registers of the same threads."""
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def _side_by_side(left, right):
    return tl.join(left, right).permute(0, 2, 1).reshape(left.shape[0], 2 * left.shape[1])


@triton.jit
def _store_parts(matrix, x, BT: tl.constexpr):
    at = matrix + tl.arange(0, BT)[:, None] * BT + tl.arange(0, BT)[None, :]
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
        rows = rows + (row,)  # noqa: RUF005 — Triton has no unpacking
    for i in tl.static_range(16):
        tl.store(inverse + block * 256 + i * 16 + column, rows[i])


@triton.jit
def _block(matrix, width: tl.constexpr, row, column):
    """The 16 x 16 block at (row, column) of [., width], in parts."""
    at = matrix + (row + tl.arange(0, 16))[:, None] * width + column + tl.arange(0, 16)[None, :]
    return split(tl.load(at))


@triton.jit
def _below(lower, BT: tl.constexpr):
    """Blocks of `lower` [BT, BT] below its diagonal, in the order of their use: (3, 2), (3, 1), (2, 1), (3, 0), …"""
    blocks = ()
    for column in tl.static_range(BT // 16 - 2, -1, -1):
        for row in tl.static_range(BT // 16 - 1, column, -1):
            blocks = blocks + (_block(lower, BT, row * 16, column * 16),)  # noqa: RUF005
    return blocks


@triton.jit
def _less(x, solved, block):
    """x - solved @ block."""
    return matmul_parts(-solved, block[0], block[1], block[2], x)


@triton.jit
def _times(x, block):
    return matmul_parts(x, block[0], block[1], block[2], tl.zeros_like(x))


@triton.jit
def _solved(p, below, inverses, BT: tl.constexpr):
    """P (I + A)^-1, columns of 16 after each other."""
    if BT == 16:
        return _times(p, inverses[0])
    elif BT == 32:
        p0, p1 = _halves(p)
        m1 = _times(p1, inverses[1])
        return _side_by_side(_times(_less(p0, m1, below[0]), inverses[0]), m1)
    else:
        left, right = _halves(p)
        p0, p1 = _halves(left)
        p2, p3 = _halves(right)
        m3 = _times(p3, inverses[3])
        m2 = _times(_less(p2, m3, below[0]), inverses[2])
        m1 = _times(_less(_less(p1, m3, below[1]), m2, below[2]), inverses[1])
        m0 = _times(_less(_less(_less(p0, m3, below[3]), m2, below[4]), m1, below[5]), inverses[0])
        return _side_by_side(_side_by_side(m0, m1), _side_by_side(m2, m3))


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
    nodes, others = r * BT + tl.arange(0, BT), c * BT + tl.arange(0, BT)
    is_node, is_other = nodes < N, others < N
    channels = tl.arange(0, K)
    bits = tl.load(ancestors + nodes * BLOCKS + c, mask=is_node, other=0)
    wait_for_inputs(OVERLAPS)
    q = tl.load(conv + nodes[:, None] * C + channels[None, :], mask=is_node[:, None], other=0.0)
    k = tl.load(conv + nodes[:, None] * C + HK * K + channels[None, :], mask=is_node[:, None], other=0.0)
    keys = k
    if BLOCKS > 1:
        keys = tl.load(conv + others[:, None] * C + HK * K + channels[None, :], mask=is_other[:, None], other=0.0)
    q_norm = tl.load(norms + nodes * 2 * HK, mask=is_node, other=0.0) * scale
    k_norm = tl.load(norms + nodes * 2 * HK + HK, mask=is_node, other=0.0)
    key_norm = tl.load(norms + others * 2 * HK + HK, mask=is_other, other=0.0)
    strength = tl.load(beta + (first + nodes) * HV + hv, mask=is_node, other=0.0)
    total = _path_sums(g, ancestors, nodes, r, N, HV, BT, BLOCKS)
    before = _path_sums(g, ancestors, others, c, N, HV, BT, BLOCKS) if BLOCKS > 1 else total
    if r == c:
        decay = tl.exp(total)
        own = factors + row * BLOCKS * BT * 3 + nodes
        tl.store(own, q_norm * decay)
        tl.store(own + BLOCKS * BT, strength)
        tl.store(own + 2 * BLOCKS * BT, k_norm * decay)
    zeros = tl.zeros([BT, BT], tl.float32)
    on_path = ((bits[:, None] >> tl.arange(0, BT)[None, :].to(tl.int64)) & 1) != 0
    decay = tl.exp(tl.where(on_path, total[:, None] - before[None, :], float("-inf"))) * key_norm[None, :]
    a = matmul(k, keys.T, zeros) * decay * (strength * k_norm)[:, None]
    a = tl.where(nodes[:, None] == others[None, :], 0.0, a)
    p = matmul(q, keys.T, zeros) * decay * q_norm[:, None]
    if r == c:
        lower = scratch + (row * BLOCKS + r) * (BT * BT + BT * 16)
        inverse = lower + BT * BT
        tl.store(lower + tl.arange(0, BT)[:, None] * BT + tl.arange(0, BT)[None, :], a)
        tl.debug_barrier()
        below = _below(lower, BT)
        _invert_diagonal(lower, inverse, BT)
        tl.debug_barrier()
        inverses = ()
        for i in tl.static_range(BT // 16):
            inverses = inverses + (_block(inverse + i * 256, 16, 0, 0),)  # noqa: RUF005
        if BLOCKS > 1:
            _store_parts(matrices, p, BT)
            one = tl.where(nodes[:, None] == others[None, :], 1.0, 0.0)
            _store_parts(matrices + 3 * BT * BT, _solved(one, below, inverses, BT), BT)
        else:
            _store_parts(matrices, _solved(p, below, inverses, BT), BT)
    else:
        _store_parts(matrices, p, BT)
        _store_parts(matrices + 3 * BT * BT, a, BT)

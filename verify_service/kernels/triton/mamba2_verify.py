"""Mamba2 over a tree: outputs of all nodes from the committed state h0, out of 16-bit commit inputs.

    y_i = e^(G_i) h0 C_i + sum over j = i and its ancestors of e^(G_i - G_j) dt_j (C_i . B_j) x_j + D x_i

One program per head, row block of 64 nodes and part of the head's values reads its part of the state once. Products
of B, C and x are exact, and what is float32 (the state, decays, weights) enters products in parts, so that the result
is as near to float64 as float32 sums allow. G_i - G_j is summed over the nodes between, as its twin does.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from verify_service.kernels.arguments import LayerCommitInputs, TreeMetadata
from verify_service.kernels.triton.launch import require
from verify_service.kernels.triton.matmul import matmul, split

ROWS = 64  # nodes per block: one word of ancestors
MAX_NODES = 256


@triton.jit
def _with_float(x, y, total):
    """total + x @ y for 16-bit or float32 x and float32 y."""
    if x.dtype == tl.bfloat16:
        first, second, third = split(y)
        return matmul(x, first, matmul(x, second, matmul(x, third, total)))
    else:
        return matmul(x.to(tl.float32), y, total)


@triton.jit
def _float_with(x, y, total):
    """total + x @ y for float32 x and 16-bit or float32 y."""
    if y.dtype == tl.bfloat16:
        first, second, third = split(x)
        return matmul(first, y, matmul(second, y, matmul(third, y, total)))
    else:
        return matmul(x, y.to(tl.float32), total)


@triton.jit
def _sees(ancestors, b, i, block, N, W: tl.constexpr, BT: tl.constexpr):
    """[BT, BT]: whether column j of `block` is row i or an ancestor of it; false for rows past the end."""
    bits = tl.load(ancestors + (b * N + i) * W + block, mask=i < N, other=0)
    return ((bits[:, None] >> tl.arange(0, BT)[None, :].to(tl.int64)) & 1) != 0


@triton.jit
def _mamba2_verify_kernel(
    conv, g, dt, ancestors, states, slots, skip, out,
    N, C, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Grid (V / BV, row blocks, B * HV). conv [B, N, C] = x | B | C; states [T, HV, V, K]; out [B, N, HV, V]."""
    part, block, bh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, head = bh // HV, bh % HV
    group = head // (HV // HK)
    slot = tl.load(slots + b).to(tl.int64)
    t = tl.arange(0, BT)
    v = part * BV + tl.arange(0, BV)
    i = block * BT + t
    row = (b * N + i).to(tl.int64) * C
    own_bits = i < N
    read = tl.zeros([BT, BV], tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        is_k = k < K
        at = HV * V + HK * K + group * K + k
        c = tl.load(conv + row[:, None] + at[None, :], mask=own_bits[:, None] & is_k[None, :], other=0.0)
        state = tl.load(
            states + ((slot * HV + head) * V + v[:, None]) * K + k[None, :],
            mask=(v < V)[:, None] & is_k[None, :], other=0.0,
        )  # fmt: skip
        read = _with_float(c, tl.trans(state), read)
    total = tl.zeros([BT], tl.float32)
    for other in range(0, block + 1):
        j = other * BT + t
        gj = tl.load(g + (b * N + j) * HV + head, mask=j < N, other=0.0)
        total += tl.sum(tl.where(_sees(ancestors, b, i, other, N, W, BT), gj[None, :], 0.0), 1)
    acc = read * tl.exp(total)[:, None]
    for other in range(0, block + 1):
        j = other * BT + t
        is_j = j < N
        column = (b * N + j).to(tl.int64) * C
        between = tl.zeros([BT, BT], tl.float32)
        for middle in range(0, block + 1):  # of m: on the path of i, and not on that of j
            m = middle * BT + t
            gm = tl.load(g + (b * N + m) * HV + head, mask=m < N, other=0.0)
            steps = tl.where(_sees(ancestors, b, i, middle, N, W, BT), gm[None, :], 0.0)
            absent = tl.where(_sees(ancestors, b, j, middle, N, W, BT), 0.0, 1.0).to(tl.bfloat16)
            between = _float_with(steps, tl.trans(absent), between)
        gram = tl.zeros([BT, BT], tl.float32)
        for k0 in range(0, K, BK):
            k = k0 + tl.arange(0, BK)
            at = HV * V + group * K + k
            is_k = k < K
            c = tl.load(
                conv + row[:, None] + HK * K + at[None, :], mask=own_bits[:, None] & is_k[None, :], other=0.0
            )  # fmt: skip
            keys = tl.load(conv + column[None, :] + at[:, None], mask=is_j[None, :] & is_k[:, None], other=0.0)
            gram = matmul(c, keys, gram)
        decay = tl.exp(tl.where(_sees(ancestors, b, i, other, N, W, BT), between, float("-inf")))
        step = tl.load(dt + (b * N + j) * HV + head, mask=is_j, other=0.0)
        x = tl.load(
            conv + column[:, None] + head * V + v[None, :], mask=is_j[:, None] & (v < V)[None, :], other=0.0
        )  # fmt: skip
        acc = _float_with(gram * decay * step[None, :], x, acc)
    mine = tl.load(
        conv + row[:, None] + head * V + v[None, :], mask=own_bits[:, None] & (v < V)[None, :], other=0.0
    )  # fmt: skip
    acc += tl.load(skip + head).to(tl.float32) * mine.to(tl.float32)
    at = ((b * N + i[:, None]) * HV + head) * V + v[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=own_bits[:, None] & (v < V)[None, :])


def mamba2_verify(
    commit_inputs: LayerCommitInputs, tree: TreeMetadata, states: Tensor, skip: Tensor, out: Tensor
) -> None:
    """HK is told by C = HV * V + 2 * HK * K."""
    b, n, channels = commit_inputs.conv.shape
    _, hv, v, k = states.shape
    hk, rest = divmod(channels - hv * v, 2 * k)
    is_whole = not rest and hk >= 1 and hv % hk == 0
    require(is_whole, "C", f"{channels} channels are not {hv} heads of {v} and groups of {k}")
    require(n <= MAX_NODES, "max_tree_budget", f"a tree has {n} nodes, more than {MAX_NODES}")
    rows = max(16, min(ROWS, triton.next_power_of_2(n)))
    part = min(32, max(16, triton.next_power_of_2(v)))
    _mamba2_verify_kernel[(triton.cdiv(v, part), triton.cdiv(n, rows), b * hv)](
        commit_inputs.conv, commit_inputs.g, commit_inputs.beta, tree.ancestors, states, tree.state_slots, skip, out,
        n, channels, hk, hv, k, v, tree.ancestors.shape[-1], rows, part, min(64, max(16, triton.next_power_of_2(k))),
        num_warps=8 if rows == ROWS else 4, num_stages=2,
    )  # fmt: skip

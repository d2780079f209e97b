"""Gated DeltaNet over a tree: outputs of all nodes from one read of the committed state S0.

    R_i = b_i (v_i - e^(G_i) S0 k_i)        o_i = e^(G_i) S0 q_i + sum over j = i and its ancestors of M_ij R_j

with M = P (I + A)^-1 of gdn_matrices.py and G_i the sum of g from the root to i (arXiv 2406.06484, section 3, for
trees). S0 is taken in three bfloat16 parts, M and R likewise, so that units of 16 bits give float32 accuracy. Of more
than 64 nodes, blocks of 64 follow each other: A U of the blocks before is taken off R of a block, U = (I + A)^-1 R, and
P U gives outputs.

The gated norm is in the same launch where whole heads are few enough, else in one behind it.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from verify_service.kernels.arguments import GatedNorm, LayerCommitInputs, TreeMetadata
from verify_service.kernels.triton.gdn_matrices import gdn_matrices_kernel
from verify_service.kernels.triton.launch import overlaps, require, require_head_sizes, wait_for_inputs
from verify_service.kernels.triton.matmul import matmul, matmul_parts, split

BLOCK = 64  # nodes
MAX_NODES = 256
WHOLE_HEADS = 132  # programs of whole heads, at most; multiprocessors of a large GPU


class GdnScratch:
    """What launches over B trees of N nodes each write for themselves. One serves all layers; an element may hold
    anything before."""

    def __init__(self, b: int, n: int, heads: int, value_dim: int, device: torch.device) -> None:
        block = self.block = min(BLOCK, max(16, triton.next_power_of_2(n)))  # nodes of a block: BT
        blocks = self.blocks = triton.cdiv(n, block)
        rows, tiles = b * heads, blocks * (blocks + 1) // 2
        # [B HV, tiles, 2, 3, BT, BT]
        self.matrices = torch.empty(rows, tiles, 2, 3, block, block, dtype=torch.bfloat16, device=device)
        # [B HV, 3, blocks BT] float32: e^G |q|^-1, beta, e^G |k|^-1
        self.factors = torch.empty(rows, 3, blocks * block, device=device)
        # [B HV, blocks, BT BT + 16 BT] float32: A and the inverses of its diagonal blocks
        self.solve = torch.empty(rows, blocks, block * block + 16 * block, device=device)
        # [B HV, blocks, V, BT] float32: U, of more than one block
        self.carried = torch.empty(rows, blocks if blocks > 1 else 0, value_dim, block, device=device)


@triton.jit
def _gated_norm(x, gate, weight, eps, V: tl.constexpr, AXIS: tl.constexpr):
    """w rmsnorm(x) silu(z) of x and z, whose V are along AXIS; `weight` broadcasts against them."""
    rounded = x.to(gate.dtype).to(tl.float32)
    normed = rounded * (1.0 / tl.sqrt(tl.sum(rounded * rounded, AXIS, keep_dims=True) / V + eps))
    scaled = weight.to(tl.float32) * normed.to(gate.dtype).to(tl.float32)
    # A weight in the activations' format gives a product in it.
    if weight.dtype == gate.dtype:
        scaled = scaled.to(weight.dtype).to(tl.float32)
    z = gate.to(tl.float32)
    return scaled * (z / (1.0 + tl.exp(-z)))


@triton.jit
def gated_norm_kernel(
    out, gate, gate_batch, gate_row, weight, eps, N, rows, HV: tl.constexpr, V: tl.constexpr, BR: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """grid (ceil(B N HV / BR),): outputs [B, N, HV, V], in place."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    dims = tl.arange(0, V)
    mask = (row < rows)[:, None]
    node = row // HV
    gate += (
        (node // N).to(tl.int64)[:, None] * gate_batch + (node % N * gate_row + row % HV * V)[:, None] + dims[None, :]
    )
    z, w = tl.load(gate, mask=mask, other=0.0), tl.load(weight + dims)
    wait_for_inputs(OVERLAPS)
    at = out + row.to(tl.int64)[:, None] * V + dims[None, :]
    values = _gated_norm(tl.load(at, mask=mask, other=0.0), z, w[None, :], eps, V, 1)
    tl.store(at, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gdn_verify_kernel(
    conv, matrices, factors, carried, states, slots, out, gate, gate_batch, gate_row, weight, eps, N,
    C: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    BK: tl.constexpr, BT: tl.constexpr, BLOCKS: tl.constexpr, NORM: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """grid (B HV, V / BV): BV of a head's values for all nodes; all V of them where a NORM follows. Everything is
    transposed, so that S0 [V, K] comes as it lies and its parts stay in registers."""
    row = tl.program_id(0).to(tl.int64)
    b, hv = row // HV, row % HV
    hk = hv // (HV // HK)
    dims = tl.program_id(1) * BV + tl.arange(0, BV)
    t = tl.arange(0, BT)
    slot = tl.load(slots + b).to(tl.int64)
    state = states + (slot * HV + hv) * V * K + dims[:, None] * K
    conv += b * N * C
    out += b * N * HV * V + hv * V
    matrices += row * (BLOCKS * (BLOCKS + 1) // 2) * 6 * BT * BT + t[None, :] * BT + t[:, None]
    factors += row * BLOCKS * BT * 3
    carried += row * BLOCKS * V * BT + dims[:, None] * BT + t[None, :]
    for r in range(BLOCKS):
        nodes = r * BT + t
        is_node = (nodes < N)[None, :]
        v = tl.load(conv + nodes[None, :] * C + 2 * HK * K + hv * V + dims[:, None], mask=is_node, other=0.0)
        z = v
        if NORM:
            at_gate = gate + b * gate_batch + nodes[None, :] * gate_row + hv * V + dims[:, None]
            z = tl.load(at_gate, mask=is_node, other=0.0)
        read_k = tl.zeros([BV, BT], tl.float32)
        read_q = tl.zeros([BV, BT], tl.float32)
        for start in tl.static_range(0, K, BK):
            keys = start + tl.arange(0, BK)
            here = conv + nodes[None, :] * C + hk * K + keys[:, None]
            q = tl.load(here, mask=is_node, other=0.0)
            k = tl.load(here + HK * K, mask=is_node, other=0.0)
            s = tl.load(state + keys[None, :])
            if k.dtype == tl.bfloat16:
                part1, part2, part3 = split(s)
                read_k = matmul(part1, k, matmul(part2, k, matmul(part3, k, read_k)))
                read_q = matmul(part1, q, matmul(part2, q, matmul(part3, q, read_q)))
            else:
                read_k = matmul(s, k.to(tl.float32), read_k)
                read_q = matmul(s, q.to(tl.float32), read_q)
        if OVERLAPS and r == 0:
            wait_for_inputs(OVERLAPS)
        tile = matrices + r * (r + 1) // 2 * 6 * BT * BT
        own = tile + (r * 6 + (3 if BLOCKS > 1 else 0)) * BT * BT
        part1, part2, part3 = tl.load(own), tl.load(own + BT * BT), tl.load(own + 2 * BT * BT)
        total = read_q * tl.load(factors + nodes)[None, :]
        right = v.to(tl.float32) - read_k * tl.load(factors + 2 * BLOCKS * BT + nodes)[None, :]
        right = right * tl.load(factors + BLOCKS * BT + nodes)[None, :]
        for c in range(r):
            u = tl.load(carried + c * V * BT)
            at = tile + c * 6 * BT * BT
            total = matmul_parts(u, tl.load(at), tl.load(at + BT * BT), tl.load(at + 2 * BT * BT), total)
            at += 3 * BT * BT
            right = matmul_parts(-u, tl.load(at), tl.load(at + BT * BT), tl.load(at + 2 * BT * BT), right)
        if BLOCKS > 1:
            right = matmul_parts(right, part1, part2, part3, tl.zeros([BV, BT], tl.float32))
            tl.store(carried + r * V * BT, right)
            tl.debug_barrier()
            own -= 3 * BT * BT
            part1, part2, part3 = tl.load(own), tl.load(own + BT * BT), tl.load(own + 2 * BT * BT)
        total = matmul_parts(right, part1, part2, part3, total)
        if NORM:
            total = _gated_norm(total, z, tl.load(weight + dims)[:, None], eps, V, 0)
        tl.store(out + nodes[None, :] * HV * V + dims[:, None], total.to(out.dtype.element_ty), mask=is_node)


@triton.jit
def gdn_root_kernel(
    conv, norms, g, beta, states, slots, out, gate, gate_batch, weight, eps, scale,
    C: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    NORM: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """grid (B HV, V / BV): a lone root, which has no pairs and no solve."""
    row = tl.program_id(0).to(tl.int64)
    b, hv = row // HV, row % HV
    hk = hv // (HV // HK)
    dims, keys = tl.program_id(1) * BV + tl.arange(0, BV), tl.arange(0, K)
    slot = tl.load(slots + b).to(tl.int64)
    s = tl.load(states + (slot * HV + hv) * V * K + dims[:, None] * K + keys[None, :])
    wait_for_inputs(OVERLAPS)
    q = tl.load(conv + b * C + hk * K + keys).to(tl.float32) * (tl.load(norms + b * 2 * HK + hk) * scale)
    k = tl.load(conv + b * C + HK * K + hk * K + keys).to(tl.float32) * tl.load(norms + b * 2 * HK + HK + hk)
    v = tl.load(conv + b * C + 2 * HK * K + hv * V + dims).to(tl.float32)
    decay = tl.exp(tl.load(g + row))
    u = (v - tl.sum(s * k[None, :], 1) * decay) * tl.load(beta + row)
    total = tl.sum(s * q[None, :], 1) * decay + tl.sum(q * k, 0) * u
    if NORM:
        z = tl.load(gate + b * gate_batch + hv * V + dims)
        total = tl.sum(_gated_norm(total[None, :], z[None, :], tl.load(weight + dims)[None, :], eps, V, 1), 0)
    tl.store(out + row * V + dims, total.to(out.dtype.element_ty))


def _pipeline_stages(rows: Tensor) -> int:
    """Stages of a loop over blocks of nodes. Three take 216 KiB of shared memory for 16-bit rows, which only GPUs of
    data centres have; one takes 48, whatever the rows."""
    is_cuda = rows.device.type == "cuda"
    is_large = is_cuda and torch.cuda.get_device_capability(rows.device)[0] in (9, 10)
    return 3 if is_large and rows.dtype.itemsize == 2 else 1


class GdnVerify:
    """The launcher. It keeps scratch memory by shape, since captured graphs hold on to it."""

    def __init__(self) -> None:
        self.scratch = functools.cache(GdnScratch)

    def __call__(
        self, commit_inputs: LayerCommitInputs, tree: TreeMetadata, states: Tensor, norm: GatedNorm | None, out: Tensor
    ) -> None:
        conv, norms, g, beta = commit_inputs.conv, commit_inputs.norms, commit_inputs.g, commit_inputs.beta
        assert norms is not None
        b, n, channels = conv.shape
        heads, value_dim, key_dim = states.shape[1:]
        key_heads = norms.shape[-1] // 2
        require_head_sizes(linear_key_head_dim=key_dim, linear_value_head_dim=value_dim)
        require(n <= MAX_NODES, "tree_budget", f"tree_budget allows {MAX_NODES} nodes, not {n}, on a GPU")
        overlap = overlaps(conv.device)
        gate, weight, eps = (out, out, 0.0) if norm is None else (norm.gate, norm.weight, norm.eps)
        if n == 1:
            rows = value_dim if norm is not None else min(value_dim, 32)
            gdn_root_kernel[(b * heads, value_dim // rows)](
                conv, norms, g, beta, states, tree.state_slots, out, gate, gate.stride(0), weight, eps, key_dim**-0.5,
                channels, key_heads, heads, key_dim, value_dim, rows, norm is not None, overlap,
                num_warps=max(1, rows * key_dim // 2048), launch_pdl=overlap,
            )  # fmt: skip
            return
        scratch = self.scratch(b, n, heads, value_dim, conv.device)
        block, blocks = scratch.block, scratch.blocks
        gdn_matrices_kernel[(b * heads, blocks * (blocks + 1) // 2)](
            conv, norms, g, beta, tree.ancestors, scratch.matrices, scratch.factors, scratch.solve, n, key_dim**-0.5,
            channels, key_heads, heads, key_dim, block, blocks, overlap, num_warps=4, launch_pdl=overlap,
        )  # fmt: skip
        # A norm needs whole heads. Programs of those are slower where halves keep every multiprocessor busy, and have
        # no room for more blocks.
        is_normed = norm is not None and blocks == 1 and value_dim <= (128 if b * heads <= WHOLE_HEADS else 64)
        rows = value_dim if is_normed else min(value_dim, 64)
        gdn_verify_kernel[(b * heads, value_dim // rows)](
            conv, scratch.matrices, scratch.factors, scratch.carried, states, tree.state_slots, out,
            gate, gate.stride(0), gate.stride(1), weight, eps, n, channels, key_heads, heads, key_dim, value_dim, rows,
            min(key_dim, 64), block, blocks, is_normed, overlap, num_warps=8 if rows > 64 else 4,
            num_stages=_pipeline_stages(conv), launch_pdl=overlap,
        )  # fmt: skip
        if norm is not None and not is_normed:
            rows = b * n * heads
            gated_norm_kernel[(triton.cdiv(rows, 16),)](
                out, norm.gate, norm.gate.stride(0), norm.gate.stride(1), norm.weight, norm.eps, n, rows, heads,
                value_dim, 16, overlap, num_warps=4, launch_pdl=overlap,
            )  # fmt: skip

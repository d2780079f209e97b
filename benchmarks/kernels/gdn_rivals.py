"""What Gated DeltaNet over a tree is compared with: a state per node, as engines without a tree kernel keep them.

Each node takes its parent's state from memory, updates it, and leaves its own there: two states of traffic per node and
head, and N states of memory per request and layer.
"""

# Triton takes no annotations of pointers.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from verify_service.kernels.arguments import LayerCommitInputs, TreeMetadata

ROWS = 16  # of a state per program, which is one warp


@triton.jit
def state_per_node_kernel(
    conv, norms, g, beta, parents, states, slots, nodes, out, scale,
    N: tl.constexpr, C: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr,
) -> None:  # fmt: skip
    """grid (V / BV, B HV): BV rows of a head's state through all nodes of a tree."""
    row = tl.program_id(1).to(tl.int64)
    b, hv = row // HV, row % HV
    hk = hv // (HV // HK)
    dims, keys = tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, K)
    tile = dims[:, None] * K + keys[None, :]
    start = states + (tl.load(slots + b).to(tl.int64) * HV + hv) * V * K + tile
    nodes += row * N * V * K + tile
    for i in range(N):
        at = b * N + i
        parent = tl.load(parents + at)
        s = tl.load(tl.where(parent < 0, start, nodes + parent * V * K))
        q = tl.load(conv + at * C + hk * K + keys).to(tl.float32) * (tl.load(norms + at * 2 * HK + hk) * scale)
        k = tl.load(conv + at * C + HK * K + hk * K + keys).to(tl.float32) * tl.load(norms + at * 2 * HK + HK + hk)
        v = tl.load(conv + at * C + 2 * HK * K + hv * V + dims).to(tl.float32)
        s = s * tl.exp(tl.load(g + at * HV + hv))
        u = (v - tl.sum(s * k[None, :], 1)) * tl.load(beta + at * HV + hv)
        s = s + u[:, None] * k[None, :]
        tl.store(nodes + i * V * K, s)
        tl.store(out + (at * HV + hv) * V + dims, tl.sum(s * q[None, :], 1).to(out.dtype.element_ty))


def state_per_node(
    commit_inputs: LayerCommitInputs,
    tree: TreeMetadata,
    states: Tensor,  # [T, HV, V, K] float32
    nodes: Tensor,  # [B, HV, N, V, K] float32, written
    out: Tensor,  # [B, N, HV, V] written
) -> None:
    """Outputs of all nodes, and their states."""
    conv, norms = commit_inputs.conv, commit_inputs.norms
    assert norms is not None
    b, n, channels = conv.shape
    heads, value_dim, key_dim = states.shape[1:]
    launch: Any = state_per_node_kernel
    launch[(value_dim // ROWS, b * heads)](
        conv, norms, commit_inputs.g, commit_inputs.beta, tree.parents, states, tree.state_slots, nodes, out,
        key_dim**-0.5, n, channels, norms.shape[-1] // 2, heads, key_dim, value_dim, ROWS, num_warps=1,
    )  # fmt: skip


def sequential_chain(num_tokens: int, heads: tuple[int, int], dims: tuple[int, int], layers: int) -> list[Any] | None:
    """Calls of flash-linear-attention's one-token-after-another kernel on chains; None where it is not installed."""
    try:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule  # type: ignore[import-not-found]
    except ImportError:
        return None
    recurrent: Any = fused_recurrent_gated_delta_rule
    (hk, hv), (k, v) = heads, dims
    query = torch.randn(1, num_tokens, hk, k, device="cuda", dtype=torch.bfloat16)
    key, value = torch.randn_like(query), torch.randn(1, num_tokens, hv, v, device="cuda", dtype=torch.bfloat16)
    g = -torch.rand(1, num_tokens, hv, device="cuda")
    beta = torch.rand(1, num_tokens, hv, device="cuda", dtype=torch.bfloat16)
    states = [torch.randn(1, hv, k, v, device="cuda") for _ in range(layers)]
    return [
        lambda state=state: recurrent(
            query, key, value, g=g, beta=beta, initial_state=state, output_final_state=False,
            use_qk_l2norm_in_kernel=True,
        )
        for state in states
    ]  # fmt: skip

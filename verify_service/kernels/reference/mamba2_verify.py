"""Mamba2 over a tree: outputs of all nodes from the committed state, without a state per node.

    y_i = e^(G_i) h0 C_i + sum over j = i and its ancestors of e^(G_i - G_j) dt_j (C_i . B_j) x_j

with G_i the sum of g from the root to i (the dual form of Mamba2, arXiv 2405.21060, section 6, its causal mask
replaced by the ancestor mask). Nothing to solve: what a node writes does not depend on what it reads. A token may
forget everything, so G_i - G_j is summed over the nodes between and not taken as the difference of two large sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verify_service.kernels.arguments import LayerCommitInputs, TreeMetadata
from verify_service.kernels.reference.tree_metadata import ancestor_masks


def mamba2_over_tree(
    c: Tensor,  # [B, N, HK, K] float32
    b: Tensor,  # [B, N, HK, K] float32
    x: Tensor,  # [B, N, HV, V] float32
    g: Tensor,  # [B, N, HV] float32, log decay, at most 0
    dt: Tensor,  # [B, N, HV] float32, time step
    state: Tensor,  # [B, HV, V, K] float32, committed
    ancestor_mask: Tensor,  # [B, N, N] float32: 1 where j is i or its ancestor
    ancestor_bias: Tensor,  # [B, N, N] float32: 0 where j is i or its ancestor, else -inf
) -> Tensor:  # [B, N, HV, V] float32
    """Head j reads group j // (HV / HK). The state is not changed; the skip D x is the caller's."""
    rows, n, hk, dk = b.shape
    hv, dv = x.shape[2:]
    group = hv // hk
    queries = c.transpose(1, 2).reshape(rows * hk, n, dk)
    keys = b.transpose(1, 2).reshape(rows * hk, n, dk)
    gram = torch.bmm(queries, keys.transpose(1, 2)).view(rows, hk, 1, n, n)
    read = torch.bmm(queries, state.reshape(rows * hk, group * dv, dk).transpose(1, 2))
    read = read.view(rows, hk, n, group, dv).transpose(2, 3).reshape(rows * hv, n, dv)
    steps = ancestor_mask[:, None] * g.transpose(1, 2)[:, :, None, :]  # [B, HV, N, N]: g_m where m is i or its ancestor
    total = steps.sum(-1)  # [B, HV, N]
    # m is on the path of i and not on that of j: the nodes between, where j is an ancestor of i.
    between = torch.matmul(steps, (1.0 - ancestor_mask).transpose(1, 2)[:, None])
    decay = (between + ancestor_bias[:, None]).exp()
    weights = gram * decay.view(rows, hk, group, n, n) * dt.transpose(1, 2).reshape(rows, hk, group, 1, n)
    values = x.transpose(1, 2).reshape(rows * hv, n, dv)
    out = torch.baddbmm(total.exp().view(rows * hv, n, 1) * read, weights.view(rows * hv, n, n), values)
    return out.view(rows, hv, n, dv).transpose(1, 2)


def split_heads(
    conv: Tensor,  # [..., HV V + 2 HK K] x | B | C
    sizes: Sequence[int],  # HV, V, K
) -> tuple[Tensor, Tensor, Tensor]:
    """C and B [..., HK, K], and x [..., HV, V]."""
    hv, dv, dk = sizes
    x, b, c = conv.tensor_split((hv * dv, (conv.shape[-1] + hv * dv) // 2), -1)
    return c.unflatten(-1, (-1, dk)), b.unflatten(-1, (-1, dk)), x.unflatten(-1, (hv, dv))


def mamba2_verify(
    commit_inputs: LayerCommitInputs, tree: TreeMetadata, states: Tensor, skip: Tensor, out: Tensor
) -> None:
    """`mamba2_over_tree` in float32, in float64 where `out` is, for tests."""
    dtype = torch.promote_types(out.dtype, torch.float32)
    c, b, x = split_heads(commit_inputs.conv.to(dtype), states.shape[1:])
    g, dt, state = (t.to(dtype) for t in (commit_inputs.g, commit_inputs.beta, states[tree.state_slots.long()]))
    y = mamba2_over_tree(c, b, x, g, dt, state, *ancestor_masks(tree.ancestors, dtype))
    out.copy_(y + skip.to(dtype)[:, None] * x)

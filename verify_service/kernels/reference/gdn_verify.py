"""Gated DeltaNet over a tree: outputs of all nodes from the committed state, without a state per node.

    (I + A) U = R      A_ij = b_i e^(G_i - G_j) (k_i . k_j) [j proper ancestor of i]
                       R_i  = b_i (v_i - e^(G_i) S0 k_i)
    o_i = e^(G_i) S0 q_i + sum over j = i and its ancestors of e^(G_i - G_j) (q_i . k_j) u_j

with G_i the sum of g from the root to i (the chunk form of DeltaNet, arXiv 2406.06484, section 3, its causal mask
replaced by the ancestor mask). Masked before the exponential; solved by substitution, never by powers of A.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from verify_service.kernels.arguments import GatedNorm, LayerCommitInputs, TreeMetadata
from verify_service.kernels.reference.tree_metadata import ancestor_masks


def gdn_over_tree(
    q: Tensor,  # [B, N, HK, K] float32, L2-normalised
    k: Tensor,  # [B, N, HK, K] float32, L2-normalised
    v: Tensor,  # [B, N, HV, V] float32
    g: Tensor,  # [B, N, HV] float32, log decay, at most 0
    beta: Tensor,  # [B, N, HV] float32
    state: Tensor,  # [B, HV, V, K] float32, committed
    ancestor_mask: Tensor,  # [B, N, N] float32: 1 where j is i or its ancestor
    ancestor_bias: Tensor,  # [B, N, N] float32: 0 where j is i or its ancestor, else -inf
) -> Tensor:  # [B, N, HV, V] float32
    """Value head j reads key head j // (HV / HK). The state is not changed."""
    b, n, hk, dk = k.shape
    hv, dv = v.shape[2:]
    group = hv // hk
    q = q * dk**-0.5
    if n == 1:
        return _one(q, k, v, g, beta, state)
    both = torch.cat([q, k], 1).transpose(1, 2).reshape(b * hk, 2 * n, dk)
    keys = k.transpose(1, 2).reshape(b * hk, n, dk)
    gram = torch.bmm(both, keys.transpose(1, 2)).view(b, hk, 1, 2, n, n)
    read = torch.bmm(both, state.reshape(b * hk, group * dv, dk).transpose(1, 2))
    read = read.view(b, hk, 2, n, group, dv).permute(0, 1, 4, 2, 3, 5)  # [B, HK, group, 2, N, V]
    total = torch.matmul(ancestor_mask, g).transpose(1, 2)  # [B, HV, N]
    decay = (total[..., :, None] - total[..., None, :] + ancestor_bias[:, None]).exp()
    gram = (gram * decay.view(b, hk, group, 1, n, n)).reshape(b * hv, 2, n, n)
    read = read.reshape(b * hv, 2, n, dv)
    beta_ = beta.transpose(1, 2).reshape(b * hv, n, 1)
    scale = total.exp().reshape(b * hv, n, 1)
    right = beta_ * (v.transpose(1, 2).reshape(b * hv, n, dv) - scale * read[:, 1])
    # The solver takes the diagonal as ones and does not read it.
    lower = gram[:, 1] * beta_
    u = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    out = torch.baddbmm(scale * read[:, 0], gram[:, 0], u)
    return out.view(b, hv, n, dv).transpose(1, 2)


def _one(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """A lone root: no gram and no solve."""
    b, _, hk, dk = k.shape
    hv, dv = v.shape[2:]
    group = hv // hk
    both = torch.cat([q, k], 1).transpose(1, 2).reshape(b * hk, 2, dk)
    read = torch.bmm(both, state.reshape(b * hk, group * dv, dk).transpose(1, 2))
    read = read.view(b, hk, 2, group, dv) * g.exp().view(b, hk, 1, group, 1)
    u = beta.view(b, hk, group, 1) * (v.view(b, hk, group, dv) - read[:, :, 1])
    out = read[:, :, 0] + (q * k).sum(-1).view(b, hk, 1, 1) * u
    return out.view(b, 1, hv, dv)


def split_heads(
    conv: Tensor,  # [..., 2 HK K + HV V] q | k | v
    norms: Tensor,  # [..., 2 HK] 1 / |q|, 1 / |k|
    sizes: Sequence[int],  # HV, V, K
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k [..., HK, K], normalised, and v [..., HV, V]."""
    hv, dv, dk = sizes
    keys = norms.shape[-1] * dk
    q, k = (conv[..., :keys].unflatten(-1, (-1, dk)) * norms[..., None]).chunk(2, -2)
    return q, k, conv[..., keys:].unflatten(-1, (hv, dv))


def gdn_verify(
    commit_inputs: LayerCommitInputs, tree: TreeMetadata, states: Tensor, norm: GatedNorm | None, out: Tensor
) -> None:
    """`gdn_over_tree` in float32, in float64 where `out` is, for tests."""
    assert commit_inputs.norms is not None
    dtype = torch.promote_types(out.dtype, torch.float32)
    q, k, v = split_heads(commit_inputs.conv.to(dtype), commit_inputs.norms, states.shape[1:])
    g, beta, state = (t.to(dtype) for t in (commit_inputs.g, commit_inputs.beta, states[tree.state_slots.long()]))
    result = gdn_over_tree(q, k, v, g, beta, state, *ancestor_masks(tree.ancestors, dtype))
    if norm is not None:
        z = norm.gate
        normed = F.rms_norm(result.to(z.dtype).float(), (result.shape[-1],), None, norm.eps).to(z.dtype)
        result = (norm.weight * normed) * F.silu(z.float()).view_as(result)
    out.copy_(result)

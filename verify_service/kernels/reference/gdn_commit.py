"""Commit of Gated DeltaNet states: the one-token recurrence replayed along the accepted path, all layers at once.

    S <- e^g S,   u = b (v - S k),   S <- S + u k^T

One arithmetic for prefill, decoding and commits of any length, so the committed state does not depend on how the tokens
came in (bit for bit): a path of n tokens is n times the function of one token.
"""

from __future__ import annotations

from torch import Tensor


def gdn_commit_one(
    state: Tensor,  # [R, HV, V, K] float32, changed in place
    k: Tensor,  # [R, HK, K] float32, L2-normalised
    v: Tensor,  # [R, HV, V] float32
    g: Tensor,  # [R, HV] float32
    beta: Tensor,  # [R, HV] float32
) -> None:
    """One token of all R recurrent layers of one sequence."""
    r, hv, dv, dk = state.shape
    hk = k.shape[1]
    grouped = state.view(r, hk, hv // hk, dv, dk)
    decayed = grouped * g.exp().view(r, hk, hv // hk, 1, 1)
    key = k[:, :, None, None, :]
    memory = (decayed * key).sum(-1)  # [R, HK, group, V]
    u = (v.view(r, hk, hv // hk, dv) - memory) * beta.view(r, hk, hv // hk, 1)
    grouped.copy_(decayed + u[..., None] * key)

"""Commit of Mamba2 states: the one-token recurrence replayed along the accepted path, all layers at once.

    h <- e^g h + (dt x) B^T

One arithmetic for prefill, decoding and commits of any length, so the committed state does not depend on how the tokens
came in (bit for bit): a path of n tokens is n times the function of one token.
"""

from __future__ import annotations

from torch import Tensor


def mamba2_commit_one(
    state: Tensor,  # [R, HV, V, K] float32, changed in place
    b: Tensor,  # [R, HK, K] float32
    x: Tensor,  # [R, HV, V] float32
    g: Tensor,  # [R, HV] float32, log decay
    dt: Tensor,  # [R, HV] float32, time step
) -> None:
    """One token of all R recurrent layers of one sequence. Head j reads group j // (HV / HK)."""
    r, hv, dv, dk = state.shape
    hk = b.shape[1]
    grouped = state.view(r, hk, hv // hk, dv, dk)
    written = (x * dt[..., None]).view(r, hk, hv // hk, dv, 1) * b[:, :, None, None, :]
    grouped.copy_(grouped * g.exp().view(r, hk, hv // hk, 1, 1) + written)

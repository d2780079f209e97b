"""Commits, all layers at once: rows of keys and values, and the one-token recurrence replayed along accepted paths.

    Gated DeltaNet   S <- e^g S,  u = b (v - S k),  S <- S + u k^T        Mamba2   h <- e^g h + (dt x) B^T

One arithmetic for prefill, decoding and commits of any length, so that the committed state does not depend on how the
tokens came in (bit for bit): a path of n tokens is n times the function of one token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from verify_service.cache.commit_inputs import CommitInputs
from verify_service.cache.pools import Pools
from verify_service.core.target_spec import GDN, MAMBA2, RecurrentShape
from verify_service.kernels.arguments import Outcome, TreeMetadata
from verify_service.kernels.reference.gdn_verify import split_heads as gdn_heads
from verify_service.kernels.reference.mamba2_verify import split_heads as mamba2_heads


def commit_one(
    state: Tensor,  # [R, HV, V, K] float32, changed in place
    k: Tensor,  # [R, HK, K] float32: k of Gated DeltaNet, L2-normalised, B of Mamba2
    v: Tensor,  # [R, HV, V] float32: v, x
    g: Tensor,  # [R, HV] float32, log decay
    beta: Tensor,  # [R, HV] float32: beta, time step
    *,
    is_delta: bool,  # Gated DeltaNet: what the state has under k already is not written again
) -> None:
    """One token of all R recurrent layers of one sequence. Head j reads group j // (HV / HK)."""
    r, hv, dv, dk = state.shape
    hk = k.shape[1]
    heads = (r, hk, hv // hk)
    grouped, key = state.view(*heads, dv, dk), k[:, :, None, None, :]
    decayed = grouped * g.exp().view(*heads, 1, 1)
    u = v.view(*heads, dv)
    if is_delta:
        u = u - (decayed * key).sum(-1)
    u = u * beta.view(*heads, 1)  # [R, HK, group, V]
    grouped.copy_(decayed + u[..., None] * key)


def _gdn_token(state: Tensor, conv: Tensor, norms: Tensor, g: Tensor, beta: Tensor) -> None:
    _, k, v = gdn_heads(conv.float(), norms, state.shape[1:])
    commit_one(state, k, v, g, beta, is_delta=True)


def _mamba2_token(state: Tensor, conv: Tensor, norms: Tensor, g: Tensor, dt: Tensor) -> None:
    del norms
    _, b, x = mamba2_heads(conv.float(), state.shape[1:])
    commit_one(state, b, x, g, dt, is_delta=False)


# One token of all layers of a sequence: state [R, HV, V, K], conv [R, C], norms [R, 2 HK], g and beta [R, HV]. A short
# convolution has no state to replay.
TOKENS: dict[str, Callable[..., None]] = {GDN: _gdn_token, MAMBA2: _mamba2_token}


def commit_window(
    window: Tensor,  # [R, kernel_size - 1, C], newest last; changed in place
    inputs: Tensor,  # [R, P, C] inputs of the accepted path
) -> None:
    """Shifts the accepted inputs into the windows of all R layers."""
    keep = window.shape[1]
    stays = max(keep - inputs.shape[1], 0)  # newest of the old ones
    window.copy_(torch.cat([window[:, keep - stays :], inputs], 1) if stays else inputs[:, -keep:])


def commit_path(
    commit_token: Callable[..., None] | None,
    commit_inputs: CommitInputs,
    row: int,
    path: Tensor,  # [P] int64, nodes
    pools: Pools,
    state_slot: int,
) -> None:
    """Moves a slot's states and windows on along a path of batch row `row`; `commit_token` as in TOKENS."""
    if commit_token is not None:
        # Token-major copies, so that each token's inputs are contiguous: [P, R, ...].
        parts = (commit_inputs.conv, commit_inputs.norms, commit_inputs.g, commit_inputs.beta)
        conv, norms, g, beta = (t[:, row].transpose(0, 1).index_select(0, path) for t in parts)
        state = pools.states[:, state_slot]
        for i in range(path.shape[0]):
            commit_token(state, conv[i], norms[i], g[i], beta[i])
    commit_window(pools.windows[:, state_slot], commit_inputs.inputs[:, row].index_select(1, path))


def recurrent_commit(
    shape: RecurrentShape, commit_inputs: CommitInputs, outcome: Outcome, pools: Pools, tree: TreeMetadata
) -> None:
    """One row of the batch after another."""
    for row, length in enumerate(outcome.path_length.tolist()):
        if length:
            path, slot = outcome.path[row, :length].long(), int(tree.state_slots[row])
            commit_path(TOKENS.get(shape.kind), commit_inputs, row, path, pools, slot)


def commit_rows(
    pool: Tensor,  # [A, HKV, S, D], changed in place
    nodes: Tensor,  # [A, N, HKV, D], rows of one sequence's nodes
    path: Tensor,  # [P] int64, accepted nodes
    destination: Tensor,  # [P] int64, pool rows of the committed positions
) -> None:
    """Rows were rotated for prefix + depth, which is where they go."""
    pool.index_copy_(2, destination, nodes.index_select(1, path).transpose(1, 2))


def kv_commit(commit_inputs: CommitInputs, outcome: Outcome, pools: Pools, tree: TreeMetadata, page_size: int) -> None:
    """One row of the batch after another."""
    for row, length in enumerate(outcome.path_length.tolist()):
        path = outcome.path[row, :length].long()
        at = int(tree.base_lengths[row]) + torch.arange(length, device=path.device)
        slots = tree.page_table[row, at // page_size].long() * page_size + at % page_size
        for pool, nodes in ((pools.keys, commit_inputs.keys), (pools.values, commit_inputs.values)):
            commit_rows(pool, nodes[:, row], path, slots)

"""Commit of recurrent layers: states and windows move on along the accepted paths, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from verify_service.cache.commit_inputs import CommitInputs
from verify_service.cache.pools import Pools
from verify_service.core.target_spec import GDN, MAMBA2, RecurrentShape
from verify_service.kernels.arguments import Outcome, TreeMetadata
from verify_service.kernels.reference.gdn_commit import gdn_commit_one
from verify_service.kernels.reference.gdn_verify import split_heads as gdn_heads
from verify_service.kernels.reference.mamba2_commit import mamba2_commit_one
from verify_service.kernels.reference.mamba2_verify import split_heads as mamba2_heads
from verify_service.kernels.reference.tree_conv import commit_window


def recurrent_commit(
    shape: RecurrentShape, commit_inputs: CommitInputs, outcome: Outcome, pools: Pools, tree: TreeMetadata
) -> None:
    """One row after another, by the functions of one token; all layers together."""
    for row, length in enumerate(outcome.path_length.tolist()):
        if not length:
            continue
        path, slot = outcome.path[row, :length].long(), int(tree.state_slots[row])
        left = (commit_inputs.inputs, commit_inputs.conv, commit_inputs.norms, commit_inputs.g, commit_inputs.beta)
        inputs, conv, norms, g, beta = (t[:, row].index_select(1, path) for t in left)
        state, sizes = pools.states[:, slot], pools.states.shape[2:]
        if shape.kind == GDN:
            _, k, v = gdn_heads(conv.float(), norms, sizes)
            _replay(gdn_commit_one, state, k, v, g, beta)
        elif shape.kind == MAMBA2:
            _, b, x = mamba2_heads(conv.float(), sizes)
            _replay(mamba2_commit_one, state, b, x, g, beta)
        commit_window(pools.windows[:, slot], inputs)


def _replay(
    one: Callable[..., None],
    state: Tensor,  # [R, HV, V, K]
    *tokens: Tensor,  # [R, P, ...] each
) -> None:
    for i in range(tokens[0].shape[1]):
        one(state, *(t[:, i].contiguous() for t in tokens))

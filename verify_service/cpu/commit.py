"""Makes an accepted path permanent on a CPU: KV and feature rows, recurrent states, convolution windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.device.compilation import compiled
from draftwood.device.compiled_call_cache import CompiledCallCache
from verify_service.cache.commit_inputs import CommitInputs
from verify_service.cache.pools import Pools
from verify_service.core.target_spec import GDN, MAMBA2, RecurrentShape
from verify_service.kernels.reference.gdn_commit import gdn_commit_one
from verify_service.kernels.reference.mamba2_commit import mamba2_commit_one
from verify_service.kernels.reference.tree_conv import commit_window


def _gdn_token(state: Tensor, conv: Tensor, norms: Tensor, g: Tensor, beta: Tensor) -> None:
    """Takes k and v out of a token's q | k | v."""
    r, hv, dv, dk = state.shape
    hk = norms.shape[1] // 2
    k = conv[:, hk * dk : 2 * hk * dk].float().view(r, hk, dk) * norms[:, hk:, None]
    gdn_commit_one(state, k, conv[:, 2 * hk * dk :].float().view(r, hv, dv), g, beta)


def _mamba2_token(state: Tensor, conv: Tensor, norms: Tensor, g: Tensor, dt: Tensor) -> None:
    """Takes x and B out of a token's x | B | C."""
    del norms
    r, hv, dv, dk = state.shape
    keys = (conv.shape[1] - hv * dv) // 2
    x, b = conv[:, : hv * dv].float().view(r, hv, dv), conv[:, hv * dv : hv * dv + keys].float().view(r, -1, dk)
    mamba2_commit_one(state, b, x, g, dt)


# One token of all layers of a sequence: state [R, HV, V, K], conv [R, C], norms [R, 2 HK], g and beta [R, HV].
# A short convolution has no state to replay.
_REPLAYS: dict[str, Callable[..., None]] = {GDN: _gdn_token, MAMBA2: _mamba2_token}


class Committer:
    """Commits into the pools."""

    def __init__(self, pools: Pools, recurrent: RecurrentShape | None, *, compile_steps: bool) -> None:
        self.pools = pools
        self._calls = CompiledCallCache()
        one = _REPLAYS.get(recurrent.kind) if recurrent else None
        self._replay: Callable[..., None] | None = (
            None if one is None else compiled(one, enabled=compile_steps, dynamic=False, threaded_loops=True)
        )

    def commit(
        self,
        inputs: CommitInputs,
        row: int,
        path: Sequence[int],
        slots: NDArray[np.int64],  # [P] pool rows of the committed positions
        state_slot: int,
        features: Tensor | None,  # [P, F] projected rows of the path
    ) -> None:
        """Commits a path of batch row `row` of the last pass."""
        pools = self.pools
        nodes, destination = torch.tensor(path), torch.from_numpy(slots)
        for pool, rows in ((pools.keys, inputs.keys), (pools.values, inputs.values)):
            # Rows were rotated for prefix + depth, which is where they go.
            pool.index_copy_(2, destination, rows[:, row].index_select(1, nodes).transpose(1, 2))
        if features is not None:
            pools.features.index_copy_(0, destination, features)
        if pools.windows.shape[0]:
            self.commit_states(inputs, row, nodes, state_slot)

    def commit_states(
        self,
        inputs: CommitInputs,
        row: int,
        path: Tensor,  # [P] int64
        state_slot: int,
    ) -> None:
        """Replays the recurrence of all layers along the path, and shifts its inputs into the windows."""
        if self._replay is not None:
            self._replay_path(self._replay, inputs, row, path, state_slot)
        commit_window(self.pools.windows[:, state_slot], inputs.inputs[:, row].index_select(1, path))

    def _replay_path(
        self, replay: Callable[..., None], inputs: CommitInputs, row: int, path: Tensor, state_slot: int
    ) -> None:
        # Token-major copies, so that each token's inputs are contiguous: [P, R, ...].
        parts = (inputs.conv, inputs.norms, inputs.g, inputs.beta)
        conv, norms, g, beta = (t[:, row].transpose(0, 1).index_select(0, path) for t in parts)
        state = self.pools.states[:, state_slot]
        for i in range(path.shape[0]):
            token = (state, conv[i], norms[i], g[i], beta[i])
            self._calls.call("token", token, partial(replay, *token))

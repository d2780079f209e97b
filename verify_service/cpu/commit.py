"""Makes an accepted path permanent: KV and feature rows, recurrent states, convolution windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.device.compiled_call_cache import CompiledCallCache
from draftwood.device.device import compiled
from verify_service.cache.pools import Pools
from verify_service.core.target_spec import GDN, MAMBA2, RecurrentShape
from verify_service.cpu.target import CommitInputs
from verify_service.kernels.reference.gdn_commit import gdn_commit_one
from verify_service.kernels.reference.kv_commit import commit_rows
from verify_service.kernels.reference.mamba2_commit import mamba2_commit_one
from verify_service.kernels.reference.tree_conv import commit_window

# The one-token recurrences, which take a state and a token's k, v, g and beta; a short convolution has none.
_REPLAYS: dict[str, Callable[..., None]] = {GDN: gdn_commit_one, MAMBA2: mamba2_commit_one}


class Committer:
    """Commits into the pools. The only code that changes committed state."""

    def __init__(self, pools: Pools, recurrent: RecurrentShape | None, *, compile_steps: bool) -> None:
        self.pools = pools
        self._calls = CompiledCallCache()
        one = _REPLAYS.get(recurrent.kind) if recurrent else None
        self._replay: Callable[..., None] | None = (
            None if one is None else compiled(one, enabled=compile_steps, dynamic=False, threaded_loops=True)
        )

    def commit(
        self,
        commit_inputs: CommitInputs,
        row: int,
        path: Sequence[int],
        slots: NDArray[np.int64],  # [P] pool rows of the committed positions
        state_slot: int,
        features: Tensor | None,  # [P, F] projected rows of the path
    ) -> None:
        """Commits a path of batch row `row` of the last pass."""
        pools = self.pools
        nodes, destination = torch.tensor(path), torch.from_numpy(slots)
        commit_rows(pools.keys, commit_inputs.keys[:, row], nodes, destination)
        commit_rows(pools.values, commit_inputs.values[:, row], nodes, destination)
        if features is not None:
            pools.features.index_copy_(0, destination, features)
        if pools.windows.shape[0]:
            self.commit_states(commit_inputs, row, nodes, state_slot)

    def commit_states(self, commit_inputs: CommitInputs, row: int, path: Tensor, state_slot: int) -> None:
        """Replays the recurrence of all layers along the path, and shifts its inputs into the windows."""
        if self._replay is not None:
            self._replay_path(self._replay, commit_inputs, row, path, state_slot)
        commit_window(self.pools.windows[:, state_slot], commit_inputs.inputs[:, row].index_select(1, path))

    def _replay_path(
        self, replay: Callable[..., None], commit_inputs: CommitInputs, row: int, path: Tensor, state_slot: int
    ) -> None:
        # Token-major copies, so that each token's inputs are contiguous: [P, R, ...].
        k, v, g, beta = (
            t[:, row].transpose(0, 1).index_select(0, path)
            for t in (commit_inputs.k, commit_inputs.v, commit_inputs.g, commit_inputs.beta)
        )
        state = self.pools.states[:, state_slot]
        for i in range(path.shape[0]):
            token = (state, k[i], v[i], g[i], beta[i])
            self._calls.call("token", token, partial(replay, *token))

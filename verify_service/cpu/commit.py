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
from verify_service.core.target_spec import RecurrentShape
from verify_service.kernels.reference.commit import TOKENS, commit_path, commit_rows


class Committer:
    """Commits into the pools, by the reference kernels with the function of one token compiled."""

    def __init__(self, pools: Pools, recurrent: RecurrentShape | None, *, compile_steps: bool) -> None:
        self.pools = pools
        self._calls = CompiledCallCache()
        one = TOKENS.get(recurrent.kind) if recurrent else None
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
        commit_rows(pools.keys, inputs.keys[:, row], nodes, destination)
        commit_rows(pools.values, inputs.values[:, row], nodes, destination)
        if features is not None:
            pools.features.index_copy_(0, destination, features)
        if pools.windows.shape[0]:
            self.commit_states(inputs, row, nodes, state_slot)

    def commit_states(self, inputs: CommitInputs, row: int, path: Tensor, state_slot: int) -> None:
        """Moves the recurrent layers' part on along a path [P]."""
        commit_path(self._commit_token if self._replay else None, inputs, row, path, self.pools, state_slot)

    def _commit_token(self, *token: Tensor) -> None:
        assert self._replay is not None
        self._calls.call("token", token, partial(self._replay, *token))

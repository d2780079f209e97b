"""Makes an accepted path permanent on a CPU: KV and feature rows, recurrent states, convolution windows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.device.compilation import compiled, mark_varying
from draftwood.device.compiled_call_cache import CompiledCallCache
from verify_service.cache.commit_inputs import CommitInputs
from verify_service.cache.pools import Pools
from verify_service.core.target_spec import RecurrentShape
from verify_service.cpu.step_inputs import padded
from verify_service.kernels.reference.commit import TOKENS, commit_path, commit_rows
from verify_service.model.features import FeatureProjector


class Committer:
    """Commits into the pools, by the reference kernels with the function of one token compiled."""

    def __init__(self, pools: Pools, recurrent: RecurrentShape | None, *, compile_steps: bool) -> None:
        self.pools = pools
        self._calls = CompiledCallCache()
        one = TOKENS.get(recurrent.kind) if recurrent else None
        self._replay = one and compiled(one, enabled=compile_steps, dynamic=False, threaded_loops=True)

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


class RowProjection:
    """A projector as one compiled graph, over numbers of rows that are `padded`."""

    def __init__(self, projector: FeatureProjector, *, compile_steps: bool) -> None:
        def project(target_features: Tensor) -> list[Tensor]:
            return [projector.project(target_features)]

        self._project = compiled(project, enabled=compile_steps)
        self._constants = (*projector.fc.buffers(), *projector.hidden_norm.buffers())
        self._calls = CompiledCallCache()

    def __call__(self, target_features: Tensor, picked: list[int]) -> Tensor:
        """Rows [P, F] of the `picked` ones of target_features [M, num_layers * H]."""
        rows = padded(max(len(picked), 2))  # a lone row would be a graph of its own
        chosen = target_features.index_select(0, torch.tensor(picked + picked[:1] * (rows - len(picked))))

        def run() -> list[Tensor]:
            mark_varying(chosen, 0)
            return self._project(chosen)

        outputs = self._calls.call(rows, (chosen,), run, lambda: self._constants)
        assert outputs is not None
        return outputs[0][: len(picked)]

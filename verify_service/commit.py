"""Makes an accepted path permanent: KV and feature rows, recurrent states, convolution windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.device import compiled
from verify_service.cache.pools import Pools
from verify_service.kernels.gdn_commit import gdn_commit_one
from verify_service.kernels.kv_commit import kv_commit
from verify_service.kernels.tree_conv import commit_window
from verify_service.target.model import Stash


class Committer:
    """Commits into the pools. The only code that changes committed state."""

    def __init__(self, pools: Pools, *, compile_steps: bool) -> None:
        self.pools = pools
        self._replay: Callable[..., None] = compiled(gdn_commit_one, enabled=compile_steps, dynamic=False)

    def commit_rows(
        self,
        slots: NDArray[np.int64],  # pool rows by position
        base_length: int,
        path: Sequence[int],
        features: Tensor | None,  # [P, F] projected rows of the path
    ) -> None:
        """Moves the path's KV rows from the nodes' places to the committed positions and writes its feature rows."""
        destination = slots[base_length : base_length + len(path)]
        if path[-1] != len(path) - 1:  # else the nodes lie where they belong
            source = torch.from_numpy(slots[base_length + np.asarray(path)])
            kv_commit(self.pools.keys, source, torch.from_numpy(destination))
            kv_commit(self.pools.values, source, torch.from_numpy(destination))
        if features is not None:
            self.pools.features.index_copy_(0, torch.from_numpy(destination), features)

    def commit_states(self, stash: Stash, row: int, state_slot: int, path: Sequence[int]) -> None:
        """Replays the recurrence along the path from batch row `row` of the stash, all layers at once."""
        pools = self.pools
        index = torch.tensor(path)
        # Token-major copies, so that each token's inputs are contiguous: [P, R, ...].
        k, v, g, beta = (
            t[:, row].index_select(1, index).transpose(0, 1).contiguous()
            for t in (stash.k, stash.v, stash.g, stash.beta)
        )
        state = pools.states[:, state_slot]
        for i in range(len(path)):
            self._replay(state, k[i], v[i], g[i], beta[i])
        commit_window(pools.windows[:, state_slot], stash.inputs[:, row].index_select(1, index))

    def reset(self, state_slot: int) -> None:
        """Empties a slot for a new sequence."""
        self.pools.states[:, state_slot].zero_()
        self.pools.windows[:, state_slot].zero_()

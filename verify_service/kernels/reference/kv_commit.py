"""Commit of KV rows: the accepted nodes' rows go into the pools, all layers at once."""

from __future__ import annotations

import torch
from torch import Tensor

from verify_service.cache.commit_inputs import CommitInputs
from verify_service.cache.pools import Pools
from verify_service.kernels.arguments import Outcome, TreeMetadata


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

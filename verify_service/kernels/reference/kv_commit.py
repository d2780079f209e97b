"""Commit of KV rows: the accepted nodes' rows go into the pool, all layers at once."""

from __future__ import annotations

from torch import Tensor


def kv_commit(
    pool: Tensor,  # [A, HKV, S, D], changed in place
    nodes: Tensor,  # [A, HKV, N, D], rows of one sequence's nodes
    path: Tensor,  # [P] int64, accepted nodes
    destination: Tensor,  # [P] int64, pool rows of the committed positions
) -> None:
    """Rows were rotated for prefix + depth, which is where they go."""
    pool.index_copy_(2, destination, nodes.index_select(2, path))

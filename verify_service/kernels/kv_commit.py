"""Commit of KV rows: accepted nodes move to the front of the step's rows, all layers at once."""

from __future__ import annotations

from torch import Tensor


def kv_commit(
    pool: Tensor,  # [A, HKV, S, D], changed in place
    source: Tensor,  # [P] int64, pool rows of the accepted nodes
    destination: Tensor,  # [P] int64, pool rows of the committed positions
) -> None:
    """Reads all rows before it writes any, since source and destination overlap."""
    pool.index_copy_(2, destination, pool.index_select(2, source))

"""Commit of one sequence's KV rows."""

from __future__ import annotations

import pytest
import torch

from verify_service.kernels.reference.commit import commit_rows


@pytest.mark.parametrize("path", [[0], [0, 1, 2], [0, 2, 3, 7], [0, 5], [0, 1, 4, 5, 6]])
def test_commit_rows_moves_the_path_and_nothing_else(path: list[int]) -> None:
    pool, nodes = torch.randn(2, 3, 40, 5), torch.randn(2, 8, 3, 5)
    slots, before = torch.randperm(40)[: len(path)], pool.clone()
    commit_rows(pool, nodes, torch.tensor(path), slots)
    for i, node in enumerate(path):
        assert torch.equal(pool[:, :, slots[i]], nodes[:, node])
    untouched = torch.ones(40, dtype=torch.bool)
    untouched[slots] = False
    assert torch.equal(pool[:, :, untouched], before[:, :, untouched])

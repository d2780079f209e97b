"""Trees as drafts have them, and what kernels are told of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from verify_service.kernels.arguments import NODES_PER_WORD, TreeMetadata
from verify_service.kernels.reference.tree_metadata import tree_metadata


def random_parents(rng: random.Random, nodes: int, depth: int = 15) -> list[int]:
    """Parents with long paths and siblings, at most `depth` deep; -1 for the root."""
    parents, depths = [-1], [0]
    while len(parents) < nodes:
        parent = len(parents) - 1 if rng.random() < 0.4 else rng.randrange(len(parents))
        if depths[parent] < depth:
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return parents


def underived_metadata(
    trees: Sequence[Sequence[int]],  # parents of each
    num_nodes: int,
    device: torch.device,
    *,
    base_lengths: Sequence[int] = (),
    page_table: Tensor | None = None,  # [B, P] int32
) -> TreeMetadata:
    """Trees padded to N nodes, in state slots B, …, 2, 1; what `tree_metadata` writes is poisoned."""
    b, words = len(trees), -(-num_nodes // NODES_PER_WORD)

    def given(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def poisoned(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(size, -77, dtype=dtype, device=device)

    parents = [[*tree, *[-1] * (num_nodes - len(tree))] for tree in trees]
    return TreeMetadata(
        parents=given([parent for row in parents for parent in row]).view(b, num_nodes),
        num_nodes=given([len(tree) for tree in trees]),
        base_lengths=given(base_lengths or [0] * b),
        state_slots=given(range(b, 0, -1)),
        page_table=poisoned(b, 1) if page_table is None else page_table.to(device),
        positions=poisoned(b, num_nodes, dtype=torch.int64),
        ancestors=poisoned(b, num_nodes, words, dtype=torch.int64),
        depths=poisoned(b, num_nodes),
        tree_depth=poisoned(b),
        block_depth=poisoned(b, words),
    )


def metadata_of(
    trees: Sequence[Sequence[int]],
    num_nodes: int,
    device: torch.device,
    *,
    base_lengths: Sequence[int] = (),
    page_table: Tensor | None = None,
) -> TreeMetadata:
    """The same, derived by the plain twin."""
    tree = underived_metadata(trees, num_nodes, device, base_lengths=base_lengths, page_table=page_table)
    tree_metadata(tree)
    return tree

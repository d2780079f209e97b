"""Trees as the kernels take them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from benchmarks.kernels.trees import random_parents
from tests.verify_service.oracles import path_to


@dataclass(frozen=True, slots=True)
class Trees:
    """B trees padded to N nodes. Spare nodes see themselves alone."""

    parents_of: list[list[int]]
    parents: Tensor  # [B, N] int32
    ancestors: Tensor  # [B, N, ceil(N / 64)] int64

    @classmethod
    def of(cls, parents_of: Sequence[Sequence[int]], num_nodes: int, device: torch.device) -> Self:
        parents = torch.full((len(parents_of), num_nodes), -1, dtype=torch.int32)
        words = [[[0] * ((num_nodes + 63) // 64) for _ in range(num_nodes)] for _ in parents_of]
        for b, tree in enumerate(parents_of):
            parents[b, : len(tree)] = torch.tensor(tree, dtype=torch.int32)
            for i in range(num_nodes):
                for j in path_to(tree, i) if i < len(tree) else [i]:
                    words[b][i][j // 64] |= 1 << (j % 64)
        signed = [[[w - (1 << 64) if w >> 63 else w for w in node] for node in tree] for tree in words]
        return cls([list(tree) for tree in parents_of], parents.to(device), torch.tensor(signed).to(device))

    @classmethod
    def draw(cls, seed: int, batch: int, num_nodes: int, device: torch.device, spare: int = 0) -> Self:
        """Random trees, the last `spare` nodes of each left over."""
        rng = random.Random(seed)
        return cls.of([random_parents(rng, num_nodes - spare) for _ in range(batch)], num_nodes, device)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device) -> Tensor:
    """A tensor of NaN, which whatever reads it before it is written shows."""
    return torch.full(shape, torch.nan, dtype=dtype, device=device)

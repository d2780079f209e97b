"""Trees as the kernels take them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from benchmarks.kernels.trees import metadata_of, random_parents
from verify_service.kernels.arguments import TreeMetadata


@dataclass(frozen=True, slots=True)
class Trees:
    """B trees padded to N nodes. Spare nodes see themselves alone."""

    parents_of: list[list[int]]
    metadata: TreeMetadata

    @classmethod
    def of(cls, parents_of: Sequence[Sequence[int]], num_nodes: int, device: torch.device) -> Self:
        return cls([list(tree) for tree in parents_of], metadata_of(parents_of, num_nodes, device))

    @classmethod
    def draw(cls, seed: int, batch: int, num_nodes: int, device: torch.device, spare: int = 0) -> Self:
        """Random trees, the last `spare` nodes of each left over."""
        rng = random.Random(seed)
        return cls.of([random_parents(rng, num_nodes - spare) for _ in range(batch)], num_nodes, device)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device) -> Tensor:
    """A tensor of NaN, which whatever reads it before it is written shows."""
    return torch.full(shape, torch.nan, dtype=dtype, device=device)

"""Trees as drafts have them, and what kernels are told of them."""

from __future__ import annotations

import random
from collections.abc import Sequence


def random_parents(rng: random.Random, nodes: int, depth: int = 15) -> list[int]:
    """Parents with long paths and siblings, at most `depth` deep; -1 for the root."""
    parents, depths = [-1], [0]
    while len(parents) < nodes:
        parent = len(parents) - 1 if rng.random() < 0.4 else rng.randrange(len(parents))
        if depths[parent] < depth:
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return parents


def ancestor_words(parents: Sequence[int]) -> list[list[int]]:
    """Ancestor bitsets [N, W] as signed words of 64 nodes."""
    seen: list[int] = []
    for i, parent in enumerate(parents):
        seen.append((seen[parent] if parent >= 0 else 0) | 1 << i)
    words = [[(bits >> (64 * w)) & (2**64 - 1) for w in range(-(-len(parents) // 64))] for bits in seen]
    return [[w - 2**64 if w >= 2**63 else w for w in row] for row in words]

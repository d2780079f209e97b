"""The tree that a verify service wants of a drafter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TreeOptions:
    """`tree_budget` counts nodes without the root, `width_cap` and `num_candidates` tokens per depth."""

    algorithm: str  # "dflash" or "ddtree"
    tree_budget: int
    width_cap: int
    spine: bool = False  # whether the whole likeliest chain goes in first
    num_candidates: int = 0  # to send beside the tree

    @property
    def width(self) -> int:
        """Candidates per depth that such a tree can use."""
        return min(self.width_cap, self.tree_budget) if self.algorithm == "ddtree" else 1

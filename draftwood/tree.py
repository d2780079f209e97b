"""Draft trees: frozen values in topological order, node 0 the root, and the ways to build one.

`tree_budget` counts the nodes without the root, so a verify pass has tree_budget + 1 query tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from draftwood.errors import MalformedTreeError

MAX_TREE_BUDGET = 255
MAX_WIDTH = 64


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A tree of candidate tokens. All fields have length N = num_nodes; parents come before children.

    `parents[0]` is -1, `depths[0]` is 0, `log_probs[0]` is 0. `log_probs` are the drafter's own, of a node given its
    parent, natural logarithm. Every prefix of the node list is a valid tree.
    """

    token_ids: tuple[int, ...]  # [N]
    parents: tuple[int, ...]  # [N]
    depths: tuple[int, ...]  # [N]
    log_probs: tuple[float, ...]  # [N]

    @property
    def num_nodes(self) -> int:
        """N, the root included."""
        return len(self.token_ids)

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node."""
        return max(self.depths)

    @classmethod
    def root_only(cls, root: int) -> DraftTree:
        """The tree of a step without a draft."""
        return cls((root,), (-1,), (0,), (0.0,))

    @classmethod
    def chain(cls, root: int, token_ids: Sequence[int], log_probs: Sequence[float] | None = None) -> DraftTree:
        """A linear draft: each token the only child of the one before."""
        n = len(token_ids)
        values = tuple(log_probs) if log_probs is not None else (0.0,) * n
        return cls((root, *token_ids), tuple(range(-1, n)), tuple(range(n + 1)), (0.0, *values))

    @classmethod
    def from_nodes(
        cls, root: int, token_ids: Sequence[int], parents: Sequence[int], log_probs: Sequence[float]
    ) -> DraftTree:
        """Puts the root in front of nodes as they travel; `parents` count the root as node 0.

        Raises MalformedTreeError where a parent does not come before its child or a node repeats a sibling's token.
        """
        depths, seen = [0], set[tuple[int, int]]()
        for i, (token, parent) in enumerate(zip(token_ids, parents, strict=True), start=1):
            if not 0 <= parent < i:
                raise MalformedTreeError(f"parents[{i - 1}] is {parent}, not in [0, {i})", field="tree.parents")
            if (parent, token) in seen:
                raise MalformedTreeError(f"node {i} repeats its sibling's token {token}", field="tree.token_ids")
            seen.add((parent, token))
            depths.append(depths[parent] + 1)
        return cls((root, *token_ids), (-1, *parents), tuple(depths), (0.0, *log_probs))

    def prefix(self, tree_budget: int) -> DraftTree:
        """The first `tree_budget` nodes besides the root."""
        n = tree_budget + 1
        if n >= self.num_nodes:
            return self
        return DraftTree(self.token_ids[:n], self.parents[:n], self.depths[:n], self.log_probs[:n])

    def path_to(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        path = [node]
        while path[-1] > 0:
            path.append(self.parents[path[-1]])
        return path[::-1]


def best_first(
    root: int,
    token_ids: Sequence[Sequence[int]],  # [depths, width], best first
    scores: Sequence[Sequence[float]],  # [depths, width], descending
    tree_budget: int,
    *,
    log_probs: Sequence[Sequence[float]] | None = None,  # [depths, width]; defaults to the scores
    spine: bool = False,
) -> DraftTree:
    """The `tree_budget` nodes with the largest sums of per-depth scores (DDTree, arXiv 2604.12989, Propositions 1-3).

    Ties go to the smaller rank tuple. With `spine`, the chain of first candidates goes in before anything else.
    """
    values = scores if log_probs is None else log_probs
    num_depths, width = len(scores), len(scores[0]) if scores else 0
    nodes = _Nodes(token_ids, values)
    # Heap entries: (minus the path's score, ranks along the path, parent). The spine's nodes are known beforehand.
    heap: list[tuple[float, tuple[int, ...], int]] = []
    spine_nodes: dict[tuple[int, ...], int] = {}
    if num_depths and width:
        heap.append((-scores[0][0], (0,), 0))
    if spine:
        for depth in range(min(num_depths, tree_budget)):
            spine_nodes[(0,) * (depth + 1)] = nodes.add(depth, 0, parent=depth)
    while heap and len(nodes.parents) < tree_budget:
        negative, ranks, parent = heapq.heappop(heap)
        depth, rank = len(ranks) - 1, ranks[-1]
        row = scores[depth]
        if rank + 1 < width:
            heapq.heappush(heap, (negative + row[rank] - row[rank + 1], (*ranks[:-1], rank + 1), parent))
        node = spine_nodes.get(ranks)
        if node is None:
            node = nodes.add(depth, rank, parent)
        if depth + 1 < num_depths:
            heapq.heappush(heap, (negative - scores[depth + 1][0], (*ranks, 0), node))
    return nodes.tree(root)


class _Nodes:
    """Nodes picked so far, the root not among them."""

    def __init__(self, candidate_ids: Sequence[Sequence[int]], candidate_values: Sequence[Sequence[float]]) -> None:
        self.candidate_ids, self.candidate_values = candidate_ids, candidate_values
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.log_probs: list[float] = []

    def add(self, depth: int, rank: int, parent: int) -> int:
        """Appends candidate `rank` of `depth` (0-based) and returns its node number, the root being node 0."""
        self.token_ids.append(self.candidate_ids[depth][rank])
        self.parents.append(parent)
        self.depths.append(depth + 1)
        self.log_probs.append(self.candidate_values[depth][rank])
        return len(self.parents)

    def tree(self, root: int) -> DraftTree:
        return DraftTree((root, *self.token_ids), (-1, *self.parents), (0, *self.depths), (0.0, *self.log_probs))

"""Shadow-linear mode: the chain and the tree in one pass, of which only the chain counts.

The drafter is asked for its likeliest chain and, besides, for as many nodes of its tree as the tree's budget, so that
what it sends holds both: the chain comes first, and the tree alone is the likeliest nodes of all. Pure functions over
trees.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftwood.tree import DraftTree


def union_of(draft: DraftTree, tree_budget: int) -> DraftTree:
    """The chain and the tree of one budget, without what belongs to neither."""
    chain = range(1, chain_of(draft, tree_budget).num_nodes)
    return _part(draft, sorted({0, *chain, *_likeliest(draft, tree_budget)}))


def chain_of(union: DraftTree, length: int) -> DraftTree:
    """The chain that the nodes begin with, at most so long."""
    end = next((node for node in range(1, union.num_nodes) if union.parents[node] != node - 1), union.num_nodes)
    return union.prefix(min(end - 1, length))


def tree_of(union: DraftTree, tree_budget: int) -> tuple[DraftTree, list[int]]:
    """The tree without the chain's help, and its nodes' numbers in the union.

    It has the nodes whose paths are the likeliest. Without noise that is the tree that the drafter would have sent;
    with noise its own order differs.
    """
    kept = [0, *sorted(_likeliest(union, tree_budget))]
    return _part(union, kept), kept


def _likeliest(tree: DraftTree, num_nodes: int) -> list[int]:
    scores = [0.0] * tree.num_nodes
    for node in range(1, tree.num_nodes):
        scores[node] = scores[tree.parents[node]] + tree.log_probs[node]
    return sorted(range(1, tree.num_nodes), key=lambda node: (-scores[node], node))[:num_nodes]


def _part(tree: DraftTree, kept: Sequence[int]) -> DraftTree:
    """The tree of some nodes, in order and with their parents."""
    place = {node: i for i, node in enumerate(kept)}
    return DraftTree(
        tuple(tree.token_ids[node] for node in kept),
        (-1, *(place[tree.parents[node]] for node in kept[1:])),
        tuple(tree.depths[node] for node in kept),
        tuple(tree.log_probs[node] for node in kept),
    )

"""Trees: construction, order, prefixes, and what is rejected."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.errors import MalformedTreeError
from draftwood.tree import DraftTree, best_first

Rows = list[list[float]]


@st.composite
def candidate_scores(draw: st.DrawFn) -> Rows:
    depths = draw(st.integers(1, 5))
    width = draw(st.integers(1, 4))
    row = st.lists(st.floats(-8, 0, width=32), min_size=width, max_size=width)
    return [sorted(draw(row), reverse=True) for _ in range(depths)]


def ids_for(scores: Rows) -> list[list[int]]:
    return [[10 * d + r for r in range(len(row))] for d, row in enumerate(scores)]


def all_paths(scores: Rows) -> dict[tuple[int, ...], float]:
    """Every rank tuple with the sum of its scores: the brute force that best-first must agree with."""
    paths: dict[tuple[int, ...], float] = {}
    for depth in range(1, len(scores) + 1):
        for ranks in itertools.product(range(len(scores[0])), repeat=depth):
            paths[ranks] = math.fsum(scores[d][r] for d, r in enumerate(ranks))
    return paths


def ranks_of(tree: DraftTree, node: int) -> tuple[int, ...]:
    return tuple(tree.token_ids[i] % 10 for i in tree.path_to(node)[1:])


@given(candidate_scores(), st.integers(1, 40))
def test_best_first_holds_the_largest_sums(scores: Rows, budget: int) -> None:
    tree = best_first(7, ids_for(scores), scores, budget)
    paths = all_paths(scores)
    picked = [ranks_of(tree, i) for i in range(1, tree.num_nodes)]
    assert len(set(picked)) == len(picked) == min(budget, len(paths))
    best = sorted(paths.values(), reverse=True)[: len(picked)]
    assert [paths[r] for r in picked] == pytest.approx(best, abs=1e-6)


@given(candidate_scores(), st.integers(1, 40), st.booleans())
def test_every_prefix_is_a_valid_tree(scores: Rows, budget: int, spine: bool) -> None:
    tree = best_first(7, ids_for(scores), scores, budget, spine=spine)
    for n in range(tree.num_nodes):
        cut = tree.prefix(n)
        again = DraftTree.from_nodes(7, cut.token_ids[1:], cut.parents[1:], cut.log_probs[1:])
        assert again == cut


def test_ties_go_to_the_smaller_rank_tuple() -> None:
    scores = [[-1.0, -1.0], [0.0, -1.0]]
    tree = best_first(0, ids_for(scores), scores, 4)
    assert [ranks_of(tree, i) for i in range(1, 5)] == [(0,), (0, 0), (1,), (1, 0)]


@given(candidate_scores(), st.integers(1, 40))
def test_spine_comes_first_and_nothing_twice(scores: Rows, budget: int) -> None:
    tree = best_first(7, ids_for(scores), scores, budget, spine=True)
    spine = min(budget, len(scores))
    assert tree.parents[1 : spine + 1] == tuple(range(spine))
    assert all(token % 10 == 0 for token in tree.token_ids[1 : spine + 1])
    picked = [ranks_of(tree, i) for i in range(1, tree.num_nodes)]
    assert len(set(picked)) == len(picked) == min(budget, len(all_paths(scores)))


def test_log_probs_may_differ_from_the_ranking() -> None:
    tree = best_first(0, [[1, 2]], [[-0.1, -0.2]], 2, log_probs=[[-3.0, -0.5]])
    assert tree.log_probs == (0.0, -3.0, -0.5)


def test_chain_and_root_only() -> None:
    assert DraftTree.root_only(3).num_nodes == 1
    chain = DraftTree.chain(3, [4, 5])
    assert (chain.parents, chain.depths, chain.max_depth) == ((-1, 0, 1), (0, 1, 2), 2)
    assert chain.path_to(2) == [0, 1, 2]


@pytest.mark.parametrize(
    ("token_ids", "parents"),
    [([1], [1]), ([1], [-1]), ([1, 2], [0, 2]), ([1, 1], [0, 0]), ([1, 2, 2], [0, 1, 1])],
    ids=["own parent", "negative", "parent after child", "twin at the root", "twins below"],
)
def test_malformed_nodes_are_rejected(token_ids: list[int], parents: list[int]) -> None:
    with pytest.raises(MalformedTreeError):
        DraftTree.from_nodes(0, token_ids, parents, [0.0] * len(token_ids))

"""The accept walk over hand-made trees, and what it is not allowed to go past."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood.noise import NoiseCache
from draftwood.sampling import SamplingParams, TokenCounts
from draftwood.tree import DraftTree
from verify_service.core.accept import Accepted, Finish, accept
from verify_service.step.sampler import NodeSampler, log_probs_of

STOP = 99


def walk(tree: DraftTree, tokens: list[int], max_tokens: int = 100) -> Accepted:
    """Accepts where the target says `tokens` by depth."""
    return accept(tree, lambda node: tokens[tree.depths[node]], stop_token_ids={STOP}, max_tokens=max_tokens)


def test_stop_token_comes_before_the_limit() -> None:
    """Field bug 1: a stop token inside an accepted run, before the limit, ends the answer as a stop."""
    tree = DraftTree.chain(1, [10, 11, STOP, 20, 21, 22])
    accepted = walk(tree, [10, 11, STOP, 20, 21, 22, 23], max_tokens=5)
    assert accepted == Accepted((0, 1, 2), (10, 11, STOP), Finish.STOP)


@pytest.mark.parametrize("limit", range(1, 8))
def test_limit_cuts_an_accepted_run(limit: int) -> None:
    tree = DraftTree.chain(1, [10, 11, 12, 13, 14, 15])
    accepted = walk(tree, [10, 11, 12, 13, 14, 15, 16], max_tokens=limit)
    assert accepted.tokens == (10, 11, 12, 13, 14, 15, 16)[:limit]
    assert accepted.path == tuple(range(limit))
    assert accepted.finish is Finish.LENGTH


def test_stop_as_the_last_token_allowed_is_a_stop() -> None:
    assert walk(DraftTree.chain(1, [10, STOP]), [10, STOP, 5], max_tokens=2).finish is Finish.STOP


def test_stop_at_the_root() -> None:
    accepted = walk(DraftTree.chain(1, [STOP, 11]), [STOP, 11, 12])
    assert accepted == Accepted((0,), (STOP,), Finish.STOP)


def test_lone_root_gives_the_bonus_token() -> None:
    assert walk(DraftTree.root_only(1), [7]) == Accepted((0,), (7,), None)


def test_nothing_accepted() -> None:
    assert walk(DraftTree.chain(1, [10, 11]), [12, 0, 0]) == Accepted((0,), (12,), None)


def test_follows_branches_by_token_and_parent() -> None:
    """The same token under another parent is another node."""
    #        0 ── 1:10 ── 3:12
    #          └─ 2:11 ── 4:12 ── 5:13
    tree = DraftTree.from_nodes(1, [10, 11, 12, 12, 13], [0, 0, 1, 2, 4], [-1.0] * 5)
    assert walk(tree, [11, 12, 13, 14]) == Accepted((0, 2, 4, 5), (11, 12, 13, 14), None)
    assert walk(tree, [10, 12, 13, 14]) == Accepted((0, 1, 3), (10, 12, 13), None)


@given(st.data())
def test_accepts_what_plain_decoding_says(data: st.DataObject) -> None:
    """For any target and any tree: the tokens are those of decoding one by one, cut at stop and limit."""
    num_nodes = data.draw(st.integers(1, 20))
    parents = [data.draw(st.integers(0, i - 1)) for i in range(1, num_nodes)]
    token_ids, seen = list[int](), set[tuple[int, int]]()
    for parent in parents:
        token = data.draw(st.integers(0, 3))
        while (parent, token) in seen:
            token += 1
        seen.add((parent, token))
        token_ids.append(token)
    tree = DraftTree.from_nodes(0, token_ids, parents, [0.0] * len(parents))
    seed, limit = data.draw(st.integers(0, 1000)), data.draw(st.integers(1, 8))

    def target(prefix: tuple[int, ...]) -> int:  # a function of the tokens alone
        return hash((seed, prefix)) % 4

    def draw(node: int) -> int:
        return target(tuple(tree.token_ids[i] for i in tree.path_to(node)[1:]))

    accepted = accept(tree, draw, stop_token_ids={3}, max_tokens=limit)
    plain: list[int] = []
    while len(plain) < limit and 3 not in plain:
        plain.append(target(tuple(plain)))
    assert list(accepted.tokens) == plain[: len(accepted.tokens)]
    assert len(accepted.path) == len(accepted.tokens)
    assert [tree.token_ids[i] for i in accepted.path[1:]] == list(accepted.tokens[:-1])
    assert all(tree.parents[b] == a for a, b in pairwise(accepted.path))
    if len(accepted.tokens) == len(plain):
        assert (accepted.finish is Finish.STOP) == (plain[-1] == 3)
        assert (accepted.finish is not None) == (plain[-1] == 3 or len(plain) == limit)
    else:
        assert accepted.finish is None
        assert (accepted.path[-1], accepted.tokens[-1]) not in seen  # it ended because no child carries the token


def draws(answer: list[int], logits: torch.Tensor, tree: DraftTree, **settings: Any) -> NodeSampler:
    """Draws of a sequence in the middle of its answer."""
    values: dict[str, Any] = {
        "sampling": SamplingParams(),
        "min_new_tokens": 0,
        "num_log_probs": None,
        "stop_token_ids": frozenset({0}),
    } | settings

    def counts(path: list[int]) -> TokenCounts:
        return TokenCounts(frozenset({1}), Counter([*answer, *path]))

    sequence: Any = SimpleNamespace(
        request=SimpleNamespace(**values),
        answer=answer,
        base_length=10,
        counts=counts,
    )
    return NodeSampler(sequence, tree, logits, NoiseCache(logits.shape[1]), first_position=11)


@pytest.mark.parametrize("min_new_tokens", range(7))
def test_min_new_tokens_counts_along_the_path(min_new_tokens: int) -> None:
    """Token 0 stops and is likeliest everywhere, token 5 next: it comes as early as it may, within one tree too."""
    logits = torch.zeros(5, 8)
    logits[:, 0], logits[:, 5] = 5.0, 4.0
    tree = DraftTree.chain(5, [5, 5, 5, 5])
    accepted = accept(
        tree,
        draws([5], logits, tree, min_new_tokens=min_new_tokens),
        stop_token_ids={0},
        max_tokens=100,
    )
    # One token is there already; the stop token may come as token min_new_tokens + 1 at the earliest.
    before_stop = min(max(min_new_tokens - 1, 0), 5)
    assert accepted.tokens == ((5,) * before_stop + (0,))[:5]
    assert logits[:, 0].tolist() == [5.0] * 5  # suppressed in a copy


def test_penalties_count_the_path_and_log_probs_do_not() -> None:
    logits = torch.tensor([[0.0, 0.0, 3.0, 2.5, 0.0]] * 3)
    tree = DraftTree.chain(4, [2, 3])
    sampling = SamplingParams(presence_penalty=1.0)
    node_draws = draws([4], logits, tree, sampling=sampling, num_log_probs=2)
    # Root: 2 wins. Behind it 2 is penalised: 3. Behind both: 2 again.
    assert [node_draws(node) for node in range(3)] == [2, 3, 2]
    wanted = logits[0].double().log_softmax(0)
    assert [entry.token_id for entry in node_draws.log_probs] == [2, 3, 2]
    for entry in node_draws.log_probs:
        assert entry.log_prob == pytest.approx(float(wanted[entry.token_id]))
        assert [token for token, _ in entry.top] == [2, 3]


def test_draws_depend_on_the_position_and_not_on_the_node() -> None:
    """The same logits and position under another parent or number give the same token."""
    logits = torch.zeros(5, 50)
    tree = DraftTree.from_nodes(1, [2, 3, 4, 5], [0, 0, 1, 2], [-1.0] * 4)
    node_draws = draws([1], logits, tree, sampling=SamplingParams(temperature=1.0, seed=11))
    tokens = [node_draws(node) for node in range(5)]
    assert tokens[1] == tokens[2]
    assert tokens[3] == tokens[4]
    assert len({tokens[0], tokens[1], tokens[3]}) == 3


@given(st.lists(st.integers(-120, 120), min_size=2, max_size=40, unique=True), st.integers(0, 20))
def test_log_probs_of_is_log_softmax(quarters: list[int], num_top: int) -> None:
    values, num_top = [q / 4 for q in quarters], min(num_top, len(quarters))
    entry = log_probs_of(np.array(values, np.float32), 1, num_top)
    wanted = torch.tensor(values).double().log_softmax(0)
    assert entry.log_prob == pytest.approx(float(wanted[1]), abs=1e-9)
    order = sorted(range(len(values)), key=lambda i: -values[i])[:num_top]
    assert [token for token, _ in entry.top] == order
    assert [value for _, value in entry.top] == pytest.approx([float(wanted[i]) for i in order], abs=1e-9)

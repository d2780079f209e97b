"""Shadow-linear mode: the chain counts, the tree is reported, and neither changes a token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood.tree import DraftTree, best_first
from tests.verify_service.harness import ScriptedDrafter, config_of, run_all, start_engine
from tests.verify_service.models import save_tiny
from verify_service.core.request import Request
from verify_service.core.sequence import SequenceState
from verify_service.engine.engine import Engine
from verify_service.step.shadow import chain_of, tree_of, union_of

DEPTH, WIDTH, NEW_TOKENS = 5, 4, 40


def candidates(seed: int) -> tuple[list[list[int]], list[list[float]]]:
    """Ids and falling scores by depth."""
    rng = random.Random(seed)
    ids = [rng.sample(range(3, 250), WIDTH) for _ in range(DEPTH)]
    return ids, [sorted((-rng.random() * 4 for _ in range(WIDTH)), reverse=True) for _ in range(DEPTH)]


@given(st.integers(0, 10_000), st.integers(1, 20))
def test_the_draft_holds_the_very_chain_and_tree(seed: int, budget: int) -> None:
    """Of each budget, as they would have been drafted by themselves."""
    ids, scores = candidates(seed)
    draft = best_first(7, ids, scores, tree_budget=budget + DEPTH, spine=True)
    union = union_of(draft, budget)
    chain = chain_of(union, budget)
    length = min(budget, DEPTH)
    assert chain == DraftTree.chain(7, [row[0] for row in ids[:length]], [row[0] for row in scores[:length]])
    tree, nodes = tree_of(union, budget)
    alone = best_first(7, ids, scores, tree_budget=budget)
    assert paths(tree) == paths(alone)
    assert [union.token_ids[node] for node in nodes] == list(tree.token_ids)
    assert paths(union) == paths(chain) | paths(alone)


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tuple(tree.token_ids[i] for i in tree.path_to(node)) for node in range(tree.num_nodes)}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    torch.set_num_threads(1)
    directory: Path = tmp_path_factory.mktemp("tiny")
    layers = ["linear_attention", "full_attention"]
    save_tiny("qwen3_5_text", directory, num_hidden_layers=2, layer_types=layers, max_position_embeddings=256)
    engine = start_engine(config_of(directory))
    yield engine
    engine.stop()


def request(**values: Any) -> Request:
    given: dict[str, Any] = {"algorithm": "ddtree", "tree_budget": 8, "trace_steps": True}
    return Request(request_id="r", prompt_token_ids=(5, 9, 60, 33, 7), max_new_tokens=NEW_TOKENS, **(given | values))


def test_the_chain_counts_and_the_tree_is_reported(engine: Engine) -> None:
    """The truth is the drafter's second choice at every other position: a chain ends there, the tree goes on."""
    (plain,) = run_all(engine, [request(algorithm="none")])

    def propose(sequence: SequenceState) -> DraftTree:
        known = [*plain.tokens[len(sequence.answer) :], *[3] * DEPTH][:DEPTH]
        first = len(sequence.answer)
        ids = [[t, (t + 1) % 256] if (first + i) % 2 else [(t + 1) % 256, t] for i, t in enumerate(known)]
        return best_first(sequence.root, ids, [[-0.5, -0.9]] * DEPTH, tree_budget=8 + DEPTH, spine=True)

    assert isinstance(engine.coordinator, ScriptedDrafter)
    engine.coordinator.propose = propose
    (answer,) = run_all(engine, [request(shadow_linear=True)])
    assert answer.tokens == plain.tokens
    stats = answer.stats
    drafted = [trace for trace in answer.traces if trace.tree.num_nodes > 1]
    assert all(set(trace.path) <= set(range(len(trace.path))) for trace in drafted), "not on the chain"
    assert stats.num_accepted_tokens == sum(len(trace.path) - 1 for trace in drafted)
    assert stats.shadow_tree_tokens == sum(len(trace.shadow_path) - 1 for trace in drafted)
    assert stats.shadow_tree_tokens > stats.num_accepted_tokens > 0
    assert max(stats.drafted_by_depth) == stats.num_drafted_steps
    for trace in drafted:
        base = trace.base_length - 5
        tokens = [trace.tree.token_ids[node] for node in trace.shadow_path]
        assert tokens == plain.tokens[base : base + len(tokens)]
        assert [trace.tree.parents[node] for node in trace.shadow_path[1:]] == list(trace.shadow_path[:-1])
    assert engine.runner.observer.totals.shadow_tree_tokens == stats.shadow_tree_tokens


def no_draft(_: SequenceState) -> None:
    return None


def test_without_a_draft_nothing_is_reported(engine: Engine) -> None:
    assert isinstance(engine.coordinator, ScriptedDrafter)
    engine.coordinator.propose = no_draft
    (answer,) = run_all(engine, [request(shadow_linear=True)])
    assert answer.stats.shadow_tree_tokens == 0
    assert answer.stats.num_fallback_steps > 0

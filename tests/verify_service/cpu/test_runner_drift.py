"""Committed state after many mixed steps (long accepts, none, no draft) against one-token decoding of the same text."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from draftwood.tree import DraftTree
from tests.verify_service.harness import SteppedRunner, config_of, oracle_tree
from tests.verify_service.models import save_tiny
from verify_service.core.sequence import SequenceState

TOLERANCE = 1e-5


def mixed_steps(
    bench: SteppedRunner, sequence: SequenceState, truth: SequenceState, base_length: int, seed: int
) -> list[int]:
    """Steps the sequence to `base_length` with drafts that are right for a while, wrong, or absent; accepted counts."""
    rng = random.Random(seed)
    vocab, start = bench.runner.target.spec.vocab_size, len(sequence.request.prompt_token_ids)
    accepted: list[int] = []
    while (left := base_length - sequence.base_length) > 0:
        trees: dict[int, DraftTree] = {}
        if rng.random() < 0.8 and left > 1:
            known = truth.answer[sequence.base_length - start + 1 : base_length - start]
            depth, budget = rng.choice((0, 0, 0, 1, 2, 4, 15)), rng.choice((1, 7, 15, 31))
            trees[sequence.sequence_id] = oracle_tree(rng, sequence.root, known, vocab, depth=depth, budget=budget)
        before = sequence.base_length
        assert bench.step([sequence], trees) == []
        accepted.append(sequence.base_length - before - 1)
    assert sequence.base_length == base_length
    return accepted


def check_equal(bench: SteppedRunner, drafted: SequenceState, plain: SequenceState) -> None:
    assert drafted.answer == plain.answer[: len(drafted.answer)]
    assert drafted.base_length == plain.base_length
    wanted = bench.committed(plain)
    for name, value in bench.committed(drafted).items():
        if value.numel():
            difference = float((value - wanted[name]).norm() / wanted[name].norm())
            assert difference < TOLERANCE, (name, difference)


def check_mix(accepted: list[int], num_steps: int) -> None:
    assert len(accepted) >= num_steps
    assert accepted.count(0) > len(accepted) // 10
    assert sum(count >= 3 for count in accepted) > len(accepted) // 20
    assert max(accepted) >= 6
    assert any(a >= 3 and b == 0 for a, b in pairwise(accepted))


def check_drift(bench: SteppedRunner, num_tokens: int, num_steps: int) -> None:
    prompt = [5, 77, 130, 9]
    length = len(prompt) + num_tokens
    plain = bench.begin(prompt, 1500, algorithm="ddtree")
    bench.decode(plain, length)
    drafted = bench.begin(prompt, 1500, algorithm="ddtree", tree_budget=63)
    check_mix(mixed_steps(bench, drafted, plain, length, seed=1), num_steps)
    check_equal(bench, drafted, plain)


def test_300_mixed_steps_of_a_tiny_hybrid(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    layers = ["linear_attention", "full_attention", "linear_attention"]
    save_tiny("qwen3_5_text", tmp_path, max_position_embeddings=2048, num_hidden_layers=3, layer_types=layers)
    check_drift(SteppedRunner(config_of(tmp_path)), 716, 300)


@pytest.mark.parametrize("family", ["nemotron_h", "falcon_h1", "lfm2"])
def test_mixed_steps_of_other_recurrences(tmp_path: Path, family: str) -> None:
    torch.set_num_threads(1)
    save_tiny(family, tmp_path, max_position_embeddings=2048)
    check_drift(SteppedRunner(config_of(tmp_path)), 240, 90)


def test_mixed_steps_of_the_embedded_pair() -> None:
    torch.set_num_threads(1)
    bench = SteppedRunner(config_of("embedded", draft="embedded"))
    prompt, length = list(range(40, 60)), 125
    plain = bench.begin(prompt, 300, algorithm="ddtree")
    bench.decode(plain, length)
    drafted = bench.begin(prompt, 300, algorithm="ddtree", tree_budget=63)
    check_mix(mixed_steps(bench, drafted, plain, length, seed=3), 40)
    check_equal(bench, drafted, plain)

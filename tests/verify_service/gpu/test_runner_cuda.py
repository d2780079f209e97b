"""The engine on a real GPU, as graphs: ids and committed state of the embedded pair in float32 as on the CPU."""

from __future__ import annotations

import random

import pytest
import torch

from draftwood.tree import DraftTree
from tests.verify_service.harness import SteppedRunner, config_of
from verify_service.core.sequence import SequenceState
from verify_service.gpu.runner import GraphRunner

pytestmark = pytest.mark.gpu

PROMPT = [1, 5, 77, 300, 41, 9, 1200, 44, 2000] * 8
NEW_TOKENS = 48


def bench(device: str) -> SteppedRunner:
    config = config_of("embedded", draft="embedded", device=device, page_size=64, max_batch=2, max_tree_budget=31)
    return SteppedRunner(config)


def begun(on: SteppedRunner) -> list[SequenceState]:
    return [on.begin(prompt, 2 * NEW_TOKENS, algorithm="ddtree", tree_budget=31) for prompt in (PROMPT, PROMPT[:19])]


def trees_around(truths: list[list[int]], sequences: list[SequenceState], rng: random.Random) -> dict[int, DraftTree]:
    """Trees that are right for some tokens, with a wrong sibling at each depth."""
    trees: dict[int, DraftTree] = {}
    for truth, sequence in zip(truths, sequences, strict=True):
        token_ids, parents, last = list[int](), list[int](), 0
        for token in truth[len(sequence.answer) :][: rng.randrange(12)]:
            token_ids += [(token + 7) % 8000, token]
            parents += [last, last]
            last = len(token_ids)
        if token_ids:
            trees[sequence.sequence_id] = DraftTree.from_nodes(
                sequence.root, token_ids, parents, [-1.0] * len(token_ids)
            )
    return trees


@pytest.fixture(scope="module")
def truths() -> list[list[int]]:
    """The CPU's answers without drafts."""
    on = bench("cpu")
    sequences = begun(on)
    while min(len(s.answer) for s in sequences) < NEW_TOKENS:
        on.step(sequences, {})
    return [s.answer for s in sequences]


def test_ids_are_the_cpus(truths: list[list[int]]) -> None:
    on = bench("cuda")
    assert isinstance(on.runner, GraphRunner)
    assert on.runner.capture.enabled
    for has_trees in (False, True):
        sequences, rng, steps = begun(on), random.Random(3), 0
        while min(len(s.answer) for s in sequences) < NEW_TOKENS:
            on.step(sequences, trees_around(truths, sequences, rng) if has_trees else {})
            steps += 1
        for sequence, truth in zip(sequences, truths, strict=True):
            assert sequence.answer[:NEW_TOKENS] == truth[:NEW_TOKENS]
            on.end(sequence)
        assert steps < NEW_TOKENS // 2 or not has_trees


def test_a_path_commits_what_its_tokens_commit() -> None:
    """Contract (a), bit for bit: one commit of n nodes, and n commits of one from the same commit_inputs."""
    on = bench("cuda")
    (sequence, _), runner = begun(on), on.runner
    program, length = runner.program("step", 1, 8), 7
    with torch.inference_mode():
        tree = DraftTree.chain(sequence.root, [9, 8, 7, 6, 5, 4])
        inputs = runner.inputs_of(program)
        inputs.write(runner.rows.place([sequence]), [(sequence, tree)])
        program.verify(has_filters=False)
        torch.cuda.synchronize()
        before = [t.clone() for t in (on.pools.states, on.pools.windows)]
        result, after = program.buffers.result.host, list[list[torch.Tensor]]()
        for paths in ([list(range(length))], [[i] for i in range(length)]):
            on.pools.states.copy_(before[0])
            on.pools.windows.copy_(before[1])
            for path in paths:
                result["path"][0, : len(path)], result["path_length"][0] = path, len(path)
                program.commit()
                torch.cuda.synchronize()
            after.append([on.pools.states.clone(), on.pools.windows.clone()])
    for whole, single, was in zip(*after, before, strict=True):
        assert torch.equal(whole, single)
        assert not torch.equal(whole, was)

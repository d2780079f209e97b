"""Contract (a): from the same per-token inputs the committed state does not depend on how the tokens came in, not by
one bit. The inputs are recorded from real passes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks.kernels.trees import random_parents
from draftwood.tree import DraftTree
from tests.verify_service.harness import SteppedRunner, buffers, config_of
from tests.verify_service.models import save_tiny
from tests.verify_service.oracles import gdn_token, mamba2_token, path_to, relative_error
from verify_service.cache.commit_inputs import CommitInputs
from verify_service.core.sequence import SequenceState
from verify_service.core.target_spec import MAMBA2, RecurrentShape
from verify_service.cpu.step_inputs import StepRow

PROMPT = list(range(40, 65))


@pytest.fixture(scope="module", params=["embedded", "qwen3_5_text", "qwen3_next", "nemotron_h", "falcon_h1", "lfm2"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SteppedRunner:
    torch.set_num_threads(1)
    if request.param == "embedded":
        return SteppedRunner(config_of("embedded", draft="embedded", max_batch=8))
    directory: Path = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, directory)
    return SteppedRunner(config_of(directory, max_batch=8))


@pytest.fixture
def sequence(bench: SteppedRunner) -> Iterator[SequenceState]:
    sequence = bench.begin(PROMPT, 20, algorithm="ddtree")
    yield sequence
    bench.end(sequence)


def random_tree(root: int, num_nodes: int, seed: int) -> DraftTree:
    rng = random.Random(seed)
    parents = random_parents(rng, num_nodes)
    tokens = rng.sample(range(3, 250), num_nodes - 1)
    return DraftTree.from_nodes(root, tokens, parents[1:], [-1.0] * (num_nodes - 1))


@torch.inference_mode()
def replay(
    bench: SteppedRunner, sequence: SequenceState, commit_inputs: CommitInputs, parts: list[list[int]]
) -> dict[str, torch.Tensor]:
    """Commits the parts one after the other; returns the new state and puts the old one back."""
    states, windows = (pool[:, sequence.state_slot] for pool in (bench.pools.states, bench.pools.windows))
    before = states.clone(), windows.clone()
    for part in parts:
        bench.runner.committer.commit_states(commit_inputs, 0, torch.tensor(part), sequence.state_slot)
    after = {"states": states.clone(), "windows": windows.clone()}
    states.copy_(before[0])
    windows.copy_(before[1])
    return after


@pytest.mark.parametrize("seed", range(3))
def test_a_path_is_committed_as_one_token_at_a_time(bench: SteppedRunner, sequence: SequenceState, seed: int) -> None:
    tree = random_tree(sequence.root, 40, seed)
    commit_inputs = bench.record(sequence, tree)
    deepest = max(range(40), key=tree.depths.__getitem__)
    for node in (0, deepest, *random.Random(seed).sample(range(40), 4)):
        path = path_to(tree.parents, node)
        whole = replay(bench, sequence, commit_inputs, [path])
        single = replay(bench, sequence, commit_inputs, [[i] for i in path])
        halves = replay(
            bench, sequence, commit_inputs, [p for p in (path[: len(path) // 2], path[len(path) // 2 :]) if p]
        )
        for name, value in whole.items():
            assert torch.equal(value, single[name]), name
            assert torch.equal(value, halves[name]), name


def token_inputs(inputs: CommitInputs, layer: int, node: int, shape: RecurrentShape) -> list[torch.Tensor]:
    """k, v, g and beta of a node in float64, out of q | k | v of Gated DeltaNet or x | B | C of Mamba2."""
    conv, norms = inputs.conv[layer, 0, node].double(), inputs.norms[layer, 0, node].double()
    hk, hv, dk, dv = shape.num_key_heads, shape.num_value_heads, shape.key_dim, shape.value_dim
    if shape.kind == MAMBA2:
        v, k, _ = conv.split([hv * dv, hk * dk, hk * dk])
        k = k.view(hk, dk)
    else:
        _, k, v = conv.split([hk * dk, hk * dk, hv * dv])
        k = k.view(hk, dk) * norms[hk:, None]
    return [k, v.view(hv, dv), *(t[layer, 0, node].double() for t in (inputs.g, inputs.beta))]


def test_committed_state_is_the_recurrence(bench: SteppedRunner, sequence: SequenceState) -> None:
    tree = random_tree(sequence.root, 30, 7)
    commit_inputs = bench.record(sequence, tree)
    path = path_to(tree.parents, max(range(30), key=tree.depths.__getitem__))
    before = bench.pools.states[:, sequence.state_slot].double()
    after = replay(bench, sequence, commit_inputs, [path])["states"]
    recurrent = bench.runner.target.spec.recurrent
    assert recurrent is not None
    token = mamba2_token if recurrent.kind == MAMBA2 else gdn_token
    for layer in range(after.shape[0] if after.numel() else 0):
        wanted = before[layer]
        for i in path:
            wanted = token(wanted, *token_inputs(commit_inputs, layer, i, recurrent))
        assert relative_error(after[layer], wanted) < 2e-6


def test_prefill_chunks_of_any_size_leave_the_same_state(bench: SteppedRunner, sequence: SequenceState) -> None:
    """One pass's inputs, committed in chunks as prefill would: 64 at once, 16 + 47 + 1, sevens, ones."""
    chain = DraftTree.chain(PROMPT[0], [3 + (7 * i) % 200 for i in range(63)])
    commit_inputs = bench.record(sequence, chain)
    splits = [[0, 64], [0, 16, 63, 64], [*range(0, 64, 7), 64], list(range(65))]
    outs = [replay(bench, sequence, commit_inputs, [list(range(a, b)) for a, b in pairwise(edges)]) for edges in splits]
    for out in outs[1:]:
        assert torch.equal(out["states"], outs[0]["states"])
        assert torch.equal(out["windows"], outs[0]["windows"])


def test_chunk_size_of_a_prefill_is_noise(bench: SteppedRunner) -> None:
    """Real prefills in chunks of 1, 7 and 64 differ by the rounding of their matrix products alone."""
    sequences = [bench.begin(PROMPT, 4, chunk=chunk, algorithm="ddtree") for chunk in (64, 7, 1)]
    wanted, *others = [bench.committed(s) for s in sequences]
    for other in others:
        for name, value in wanted.items():
            if value.numel():
                assert relative_error(other[name], value.double()) < 1e-5, name
    assert len({s.root for s in sequences}) == 1
    for s in sequences:
        bench.end(s)


@torch.inference_mode()
def test_prompts_prefilled_together_are_as_if_alone(bench: SteppedRunner) -> None:
    """Three prompts of different lengths, padded into the same passes, against each by itself."""
    prompts = [PROMPT, PROMPT[::-1][:7], [9, *PROMPT, *PROMPT]]
    alone = [bench.begin(prompt, 4, algorithm="ddtree") for prompt in prompts]
    together = [bench.admit(prompt, 4, algorithm="ddtree") for prompt in prompts[:2]]
    bench.runner.prefill([(together[0], 20), (together[1], 7)])
    together.append(bench.admit(prompts[2], 4, algorithm="ddtree"))
    bench.runner.prefill([(together[0], 5), (together[2], 51)])
    for one, other in zip(alone, together, strict=True):
        assert other.is_prefilled
        assert bench.runner.first_token(other) is None
        assert other.root == one.root
        wanted, found = bench.committed(one), bench.committed(other)
        for name, value in wanted.items():
            if value.numel():
                assert relative_error(found[name], value.double()) < 1e-5, name
    for s in (*alone, *together):
        bench.end(s)


@torch.inference_mode()
def test_a_pass_writes_every_cell_that_a_commit_reads(bench: SteppedRunner, sequence: SequenceState) -> None:
    """Buffers are reused: whatever a pass leaves unwritten would be an older step's. Poisoned, it shows."""
    tree = random_tree(sequence.root, 13, 3)
    recorded = buffers(bench.record(sequence, tree))
    reused = bench.last_stash
    assert reused is not None
    for poison in (torch.nan, torch.inf):
        for buffer in buffers(reused).values():
            buffer.fill_(poison)
        again = bench.record(sequence, tree)
        assert bench.last_stash is reused
        for name, value in buffers(again).items():
            assert torch.isfinite(value).all(), name
            assert torch.equal(value, recorded[name]), name


@torch.inference_mode()
def test_a_pass_changes_no_committed_state(bench: SteppedRunner, sequence: SequenceState) -> None:
    """Only a commit does: a failed or abandoned pass leaves nothing to undo."""
    pools = bench.pools
    before = [pool.clone() for pool in (pools.keys, pools.values, pools.features, pools.states, pools.windows)]
    bench.record(sequence, random_tree(sequence.root, 20, 5))
    after = (pools.keys, pools.values, pools.features, pools.states, pools.windows)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@torch.inference_mode()
def test_hidden_states_of_a_tree_are_those_of_its_paths(bench: SteppedRunner, sequence: SequenceState) -> None:
    """Contract (b) through the whole model: every path alone as a chain, and with other siblings beside it.

    The wide random weights of the tiny models blow rounding up to 4e-5; a wrong ancestor moves a node by 1e-2 and more.
    """
    parents = random_parents(random.Random(8), 14)
    model = bench.runner.target

    def hidden(tree: DraftTree) -> torch.Tensor:
        row = StepRow(tree, sequence.base_length, sequence.slots, sequence.state_slot)
        return model.run(bench.build_step_inputs([row])).hidden[0, : tree.num_nodes].clone()

    tokens = random.Random(9).sample(range(3, 150), 13)
    tolerance = 1e-5 if model.spec.vocab_size > 256 else 1e-4
    whole = hidden(DraftTree.from_nodes(sequence.root, tokens, parents[1:], [-1.0] * 13))
    for node in range(14):
        path = path_to(parents, node)
        alone = hidden(DraftTree.chain(sequence.root, [tokens[i - 1] for i in path[1:]]))
        assert relative_error(alone[-1], whole[node].double()) < tolerance
    leaf = max(range(14), key=lambda i: len(path_to(parents, i)))
    path = path_to(parents, leaf)
    others = [token if i + 1 in path else 100 + token for i, token in enumerate(tokens)]
    changed = hidden(DraftTree.from_nodes(sequence.root, others, parents[1:], [-1.0] * 13))
    assert relative_error(changed[path], whole[path].double()) < tolerance
    for ancestor in path[1:-1]:
        others = [100 + token if i + 1 == ancestor else token for i, token in enumerate(tokens)]
        changed = hidden(DraftTree.from_nodes(sequence.root, others, parents[1:], [-1.0] * 13))
        assert relative_error(changed[leaf], whole[leaf].double()) > 1e-2


@torch.inference_mode()
def test_rows_of_others_are_neither_read_nor_written(bench: SteppedRunner) -> None:
    """Pages and slots come back used. With NaN in all that a sequence does not own, nothing changes."""
    clean = bench.begin(PROMPT, 20, algorithm="ddtree")
    trees = [random_tree(clean.root, 9, seed) for seed in range(3)]

    def run(sequence: SequenceState) -> tuple[list[int], dict[str, torch.Tensor]]:
        for tree in trees:
            bench.step([sequence], {sequence.sequence_id: DraftTree.from_nodes(
                sequence.root, tree.token_ids[1:], tree.parents[1:], tree.log_probs[1:]
            )})  # fmt: skip
        return list(sequence.answer), bench.committed(sequence)

    answer, committed = run(clean)
    bench.end(clean)
    pools, page = bench.pools, bench.scheduler.pages.page_size
    for pool in (pools.keys, pools.values):
        pool[:, :, page:] = torch.nan  # page 0 is scratch: padding reads it
    pools.features.fill_(torch.nan)
    pools.states[:, 1:], pools.windows[:, 1:] = torch.nan, torch.nan
    poisoned = bench.begin(PROMPT, 20, algorithm="ddtree")
    again, state = run(poisoned)
    assert again == answer
    for name, value in committed.items():
        assert torch.equal(state[name], value), name
    others = [i for i in range(1, pools.states.shape[1]) if i != poisoned.state_slot]
    assert torch.isnan(pools.states[:, others]).all()
    bench.end(poisoned)
    for pool in (pools.keys, pools.values, pools.features, pools.states, pools.windows):
        pool.zero_()

"""The engine over static buffers, with the plain twins of its kernels and without graphs: ids equal to transformers'
own, drawn on the device and by the host, and committed state equal to the CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwood.config import VerifyConfig
from draftwood.sampling import SamplingParams
from draftwood.tree import DraftTree
from tests.verify_service.cpu import test_runner_exactness as exactness
from tests.verify_service.harness import ScriptedDrafter, SteppedRunner, config_of, run_all
from tests.verify_service.models import save_tiny
from verify_service.build import build
from verify_service.core.request import Request
from verify_service.core.sequence import SequenceState
from verify_service.gpu.buffers import RowTable
from verify_service.kernels.kernel_set import KernelSet
from verify_service.kernels.reference.kernel_set import PLAIN

FAMILIES = ("qwen3_5_text", "gpt_oss", "falcon_h1", "lfm2")
MODES = ("none 0", "tree 63")


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[exactness.Case]:
    yield from served(request.param, tmp_path_factory.mktemp(request.param), PLAIN)


def served(name: str, directory: Path, kernels: KernelSet | None, **changes: Any) -> Iterator[exactness.Case]:
    """A tiny model of a family over static buffers, and transformers' own answers."""
    torch.set_num_threads(1)
    model = save_tiny(name, directory)
    answers = {p: exactness.reference_answer(model, p, exactness.NEW_TOKENS) for p in exactness.prompts()}
    none: Any = None
    case = exactness.Case(engine=none, reference=model, script={}, modes=MODES, answers=answers)
    settings: dict[str, Any] = {"compile": False, "max_batch": 5, "page_size": 4, **changes}
    config = VerifyConfig(target=str(directory), draft="none", dtype="float32", threads=1, **settings)
    case.engine = build(config, kernels=kernels).engine
    case.engine.coordinator = ScriptedDrafter(case.propose)  # pyright: ignore[reportAttributeAccessIssue]
    case.engine.start()
    yield case
    case.engine.stop()


@pytest.mark.parametrize("num_log_probs", [None, 3], ids=["drawn on the device", "drawn by the host"])
def test_ids_equal_transformers(case: exactness.Case, num_log_probs: int | None) -> None:
    requests = [exactness.make_request(p, num_log_probs=num_log_probs) for p in exactness.prompts()]
    for mode in MODES:
        case.script["make"] = exactness.oracle(case.truths, mode)
        outs = run_all(case.engine, requests)
        if num_log_probs is not None:
            exactness.check_greedy(case, requests, outs, mode)
        assert [out.tokens for out in outs] == [case.answers[r.prompt_token_ids][0] for r in requests], mode
        (alone,) = run_all(case.engine, requests[-1:])
        assert alone.tokens == outs[-1].tokens, mode


def test_stop_tokens_and_seeds(case: exactness.Case) -> None:
    """Rows of one batch that are greedy, sampled, penalised, and cut by a stop token, with trees and without."""
    requests, cut = mixed_requests(case)
    truth = case.answers[requests[0].prompt_token_ids][0]
    case.script["make"] = None
    plain = [out.tokens for out in run_all(case.engine, requests)]
    assert plain[0] == truth[:cut]
    assert all(token >= 100 for token in plain[4][:15])
    case.script["make"] = exactness.oracle(
        {r.prompt_token_ids: t for r, t in zip(requests, plain, strict=True)}, "tree 31"
    )
    assert [out.tokens for out in run_all(case.engine, requests)] == plain


def mixed_requests(case: exactness.Case) -> tuple[list[Request], int]:
    """One that stops, two with filters, and two whose draws are the host's; how long the first one's answer is."""
    prompts = exactness.prompts()
    truth = case.answers[prompts[0]][0]
    changes: list[dict[str, Any]] = [
        {"stop_token_ids": frozenset({truth[9]})},
        {"sampling": SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=2**63 + 5)},
        {"sampling": SamplingParams(temperature=1.0, min_p=0.02, seed=7)},
        {"sampling": SamplingParams(presence_penalty=1.0, repetition_penalty=1.2)},
        {"min_new_tokens": 16, "stop_token_ids": frozenset(range(100))},
    ]
    requests = [
        exactness.make_request(p, num_log_probs=None, **change) for p, change in zip(prompts, changes, strict=True)
    ]
    return requests, truth.index(truth[9]) + 1


def test_a_long_chain_goes_on_in_the_next_step(case: exactness.Case) -> None:
    """A path ends after 16 nodes, whoever draws."""
    for num_log_probs in (None, 0):
        request = exactness.make_request(exactness.prompts()[2], num_log_probs=num_log_probs)
        truth = case.truths[request.prompt_token_ids]

        def make(sequence: SequenceState, truth: list[int] = truth) -> DraftTree:
            return DraftTree.chain(sequence.root, truth[len(sequence.answer) :][:25])

        case.script["make"] = make
        (out,) = run_all(case.engine, [request])
        assert out.tokens == truth
        assert max(map(len, out.chunks)) == 16


def test_committed_state_equals_the_cpus() -> None:
    """Bit for bit: keys, values, states, windows and feature rows, after prefill and trees."""
    config = config_of("embedded", draft="embedded")
    cpu, rows = SteppedRunner(config), SteppedRunner(config, kernels=PLAIN)
    prompt = [5, 77, 300, 41, 9, 1200] * 12
    pair = [(bench, bench.begin(prompt, 40, algorithm="ddtree", tree_budget=15)) for bench in (cpu, rows)]
    for step in range(4):
        for bench, sequence in pair:
            tree = DraftTree.from_nodes(sequence.root, [9, 30, 31 + step, 9], [0, 0, 1, 3], [-1.0] * 4)
            assert bench.step([sequence], {sequence.sequence_id: tree}) == []
    (_, first), (_, second) = pair
    assert first.answer == second.answer
    wanted, got = (bench.committed(sequence) for bench, sequence in pair)
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-5, msg=name)


def test_rows_stay_while_they_can() -> None:
    table = RowTable(4, 3, torch.device("cpu"))
    a, b, c, d = (_sequence(i) for i in range(4))
    assert table.place([a, b, c, d]) == [0, 1, 2, 3]
    assert table.place([a, c, d]) == [0, 2, 3]
    assert table.place([d, b, c]) == [3, 0, 2]
    assert table.place([d, b]) == [1, 0]
    assert table.pages[:2].tolist() == [[2, 0, 0], [4, 0, 0]]


def _sequence(number: int) -> SequenceState:
    sequence = SequenceState(number, exactness.make_request((1,)), lambda _: None, 0.0)
    sequence.pages = [number + 1]
    return sequence

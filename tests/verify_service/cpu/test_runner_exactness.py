"""Contract (c) on tiny random models of every family: ids and log-probabilities equal to transformers' own, with
any tree, alone and in a batch; greedy and seeded."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwood.config import VerifyConfig
from draftwood.sampling import SamplingParams
from draftwood.tree import DraftTree
from tests.verify_service.harness import Answer, oracle_tree, run_all, start_engine
from tests.verify_service.models import FAMILIES, THOROUGH, VARIANTS, save_tiny
from verify_service.core.request import Request
from verify_service.core.sequence import SequenceState
from verify_service.engine.engine import Engine

NEW_TOKENS = 20
LENGTHS = (1, 3, 16, 17, 70)  # around page and chunk edges


@dataclass
class Case:
    """A served model, transformers' own answers, and the drafts in use."""

    engine: Engine
    reference: Any
    script: dict[str, Any]
    modes: tuple[str, ...]
    answers: dict[tuple[int, ...], tuple[list[int], torch.Tensor]]  # by prompt: ids and log-probabilities

    @property
    def truths(self) -> dict[tuple[int, ...], list[int]]:
        return {prompt: ids for prompt, (ids, _) in self.answers.items()}

    def propose(self, sequence: SequenceState) -> DraftTree | None:
        make = self.script.get("make")
        return make(sequence) if make is not None else None


@pytest.fixture(scope="module", params=list(FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield from served(request.param, tmp_path_factory.mktemp(request.param))


def served(name: str, directory: Path, **changes: Any) -> Iterator[Case]:
    torch.set_num_threads(1)
    model = save_tiny(name, directory, **changes)
    config = VerifyConfig(
        target=str(directory), draft="none", dtype="float32", compile=False, threads=1, max_batch=8, page_size=4
    )
    answers = {prompt: reference_answer(model, prompt, NEW_TOKENS) for prompt in prompts()}
    modes = FAMILIES[name.split()[0]].modes
    holder = Case(engine=None, reference=model, script={}, modes=modes, answers=answers)  # pyright: ignore[reportArgumentType]
    holder.engine = start_engine(config, holder.propose)
    yield holder
    holder.engine.stop()


def prompts() -> list[tuple[int, ...]]:
    rng = random.Random(4)
    return [tuple(rng.randrange(3, 250) for _ in range(n)) for n in LENGTHS]


@torch.inference_mode()
def reference_answer(model: Any, prompt: tuple[int, ...], new_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Greedy ids of transformers' generate and the log-probabilities it drew them from, float64 [new, vocab]."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0, len(prompt) :].tolist(), torch.stack(out.logits)[:, 0].double().log_softmax(-1)


def make_request(prompt: tuple[int, ...], **changes: Any) -> Request:
    request = Request(
        request_id="r",
        prompt_token_ids=prompt,
        max_new_tokens=NEW_TOKENS,
        algorithm="ddtree",
        tree_budget=63,
        num_log_probs=3,
    )
    return replace(request, **changes)


def oracle(truths: dict[tuple[int, ...], list[int]], mode: str, seed: int = 0) -> Any:
    """Drafts that are right for a random number of tokens, or absent: long accepts, none, and no draft."""
    rng = random.Random(seed)
    shape, budget = mode.split()[0], int(mode.split()[1])

    def make(sequence: SequenceState) -> DraftTree | None:
        if rng.random() < 0.2:
            return None
        truth = truths[sequence.request.prompt_token_ids][len(sequence.answer) :]
        depth = rng.randrange(0, 12)
        if shape == "chain":
            good = truth[: min(depth, budget)]
            wrong = [rng.randrange(256) for _ in range(budget - len(good))]
            return DraftTree.chain(sequence.root, [*good, *wrong])
        return oracle_tree(rng, sequence.root, truth, 256, depth=depth, budget=budget)

    return None if shape == "none" else make


def check_greedy(case: Case, requests: list[Request], outs: list[Answer], mode: str) -> None:
    for request, out in zip(requests, outs, strict=True):
        ids, log_probs = case.answers[request.prompt_token_ids]
        assert out.tokens == ids, mode
        wanted = [float(log_probs[i, token]) for i, token in enumerate(ids)]
        assert [entry.log_prob for entry in out.log_probs] == pytest.approx(wanted, abs=2e-3), mode
        if int(mode.split()[1]) >= 15:
            assert out.stats.num_accepted_tokens > 5, mode
    assert case.engine.scheduler.pages.num_used == case.engine.scheduler.slots.num_used == 0


def test_greedy_equals_transformers_together(case: Case) -> None:
    requests = [make_request(prompt) for prompt in prompts()]
    for mode in case.modes:
        case.script["make"] = oracle(case.truths, mode)
        check_greedy(case, requests, run_all(case.engine, requests), mode)


@pytest.fixture(params=list(VARIANTS))
def variant(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    yield from served(request.param, tmp_path)


def test_variants_of_a_family(variant: Case) -> None:
    requests = [make_request(prompt) for prompt in prompts()]
    for mode in variant.modes:
        variant.script["make"] = oracle(variant.truths, mode)
        check_greedy(variant, requests, run_all(variant.engine, requests), mode)


@pytest.mark.parametrize("mode", ["none 0", "tree 31"])
def test_time_steps_are_limited_as_in_a_forward_over_the_whole_text(tmp_path: Path, mode: str) -> None:
    """In answers as in prompts, however tokens come in: transformers' own one-token form forgets the limit."""
    serving = served("bamba", tmp_path, time_step_limit=(0.4, 1.0))
    case = next(serving)
    request = make_request(prompts()[-1])
    (plain,) = run_all(case.engine, [request])
    case.script["make"] = oracle({request.prompt_token_ids: plain.tokens}, mode)
    (answer,) = run_all(case.engine, [request])
    text = torch.tensor([[*request.prompt_token_ids, *answer.tokens]])
    with torch.inference_mode():
        wanted = case.reference(text).logits[0, len(request.prompt_token_ids) - 1 : -1].double().log_softmax(-1)
    assert answer.tokens == wanted.argmax(-1).tolist() != case.truths[request.prompt_token_ids]
    assert [entry.log_prob for entry in answer.log_probs] == pytest.approx(wanted.max(-1).values.tolist(), abs=2e-3)
    assert next(serving, None) is None  # stopped


def test_greedy_equals_transformers_alone(case: Case) -> None:
    """Two prompts a mode, another pair each time, so that every length runs alone."""
    for i, mode in enumerate(case.modes):
        case.script["make"] = oracle(case.truths, mode, seed=1)
        requests = [make_request(prompts()[j % len(LENGTHS)]) for j in (2 * i, 2 * i + 1)]
        check_greedy(case, requests, [run_all(case.engine, [r])[0] for r in requests], mode)


def test_seeded_sampling_does_not_depend_on_drafts_or_batch(case: Case) -> None:
    """The same seed gives the same tokens with no draft, with any tree, alone and among others."""
    params = [SamplingParams(temperature=0.8, top_p=0.95, seed=100 + i) for i in range(len(LENGTHS))]
    requests = [make_request(p, sampling=s) for p, s in zip(prompts(), params, strict=True)]
    case.script["make"] = None
    plain = [a.tokens for a in run_all(case.engine, requests)]
    assert run_all(case.engine, requests[1:2])[0].tokens == plain[1]
    truths = {r.prompt_token_ids: tokens for r, tokens in zip(requests, plain, strict=True)}
    for seed, mode in enumerate(case.modes[1:]):
        case.script["make"] = oracle(truths, mode, seed=seed)
        assert [a.tokens for a in run_all(case.engine, requests)] == plain
    assert run_all(case.engine, requests[-1:])[0].tokens == plain[-1]
    assert len({tuple(t) for t in plain}) == len(plain)


@pytest.mark.parametrize("case", [name for name, family in FAMILIES.items() if family.modes is THOROUGH], indirect=True)
def test_penalties_count_along_the_path(case: Case) -> None:
    """With penalties the draws depend on the answer so far, in a draft as without one. No model knows of them, so that
    few families stand for all."""
    sampling = SamplingParams(presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.3, logit_bias={7: 2.0})
    requests = [make_request(p, sampling=sampling) for p in prompts()[:2]]
    case.script["make"] = None
    plain = [a.tokens for a in run_all(case.engine, requests)]
    truths = {r.prompt_token_ids: tokens for r, tokens in zip(requests, plain, strict=True)}
    case.script["make"] = oracle(truths, "tree 31")
    assert [a.tokens for a in run_all(case.engine, requests)] == plain


def test_prompt_log_probs(case: Case) -> None:
    prompt = prompts()[-1]
    case.script["make"] = None
    (answer,) = run_all(case.engine, [make_request(prompt, max_new_tokens=1, num_prompt_log_probs=2)])
    with torch.inference_mode():
        logits = case.reference(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    wanted = [float(logits[i, prompt[i + 1]]) for i in range(len(prompt) - 1)]
    assert [entry.log_prob for entry in answer.prompt_log_probs] == pytest.approx(wanted, abs=2e-3)

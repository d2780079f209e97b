"""A request whose logits are not finite ends by itself, with an error that says so; its batch goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwood.errors import InternalError
from draftwood.sampling import SamplingParams
from draftwood.tree import DraftTree
from tests.verify_service.harness import ScriptedDrafter, config_of, run_all, start_engine
from tests.verify_service.models import save_tiny
from verify_service.build import build
from verify_service.core.events import Failed, Finished
from verify_service.core.request import Request
from verify_service.core.sequence import SequenceState
from verify_service.engine.engine import Engine
from verify_service.kernels.reference.kernel_set import PLAIN

POISON = 200  # a token whose embedding is broken
NEW_TOKENS = 12


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    save_tiny("qwen3_5_text", tmp_path, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    engine = start_engine(config_of(tmp_path, max_batch=3, algorithm="ddtree"))
    yield engine
    engine.stop()


def poison(engine: Engine, token: int, value: float) -> None:
    """As an overflow does it, at one token."""
    with torch.inference_mode():
        target: Any = engine.runner.target
        target.embed.weight[token] = value


def request(name: str, prompt: tuple[int, ...], **values: Any) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, max_new_tokens=NEW_TOKENS, algorithm="ddtree", **values)


KINDS = {
    "greedy": {},
    "top_p": {"sampling": SamplingParams(temperature=1.0, top_p=0.5, seed=3)},
    "top_k": {"sampling": SamplingParams(temperature=1.0, top_k=5, seed=3)},
    "log_probs": {"num_log_probs": 3},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_prompt_ends_alone(engine: Engine, kind: str, value: float) -> None:
    others = [request("one", (5, 9, 60)), request("two", (8, 8, 8, 7), **KINDS[kind])]
    truth = [answer.tokens for answer in run_all(engine, others)]
    poison(engine, POISON, value)
    bad, *rest = run_all(engine, [request("bad", (5, POISON, 60, 7), **KINDS[kind]), *others])
    assert isinstance(bad.end, Failed)
    assert isinstance(bad.end.error, InternalError)
    assert "not finite at position 4" in bad.end.error.message
    assert [answer.tokens for answer in rest] == truth
    again = run_all(engine, others)  # in pages and slots that the broken one has had
    assert [answer.tokens for answer in again] == truth


@pytest.fixture(params=["passes", "graphs"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """The engine of a CPU, and that of a GPU with plain kernels, which draws where the host does not look."""
    save_tiny("qwen3_5_text", tmp_path, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    config = config_of(tmp_path, max_batch=3, algorithm="ddtree")
    engine = build(config, kernels=PLAIN if request.param == "graphs" else None).engine
    engine.coordinator = ScriptedDrafter(lambda _: None)  # pyright: ignore[reportAttributeAccessIssue]
    engine.start()
    yield engine
    engine.stop()


def test_an_answer_that_breaks_keeps_what_was_sent(either: Engine) -> None:
    """The broken token comes among the accepted nodes of a tree."""
    engine = either
    prompt, other = (5, 9, 60), request("two", (8, 8, 8, 7))
    (truth, untouched) = (answer.tokens for answer in run_all(engine, [request("one", prompt), other]))
    place = next(
        i for i in range(4, NEW_TOKENS - 1) if truth[i] not in (*truth[:i], *untouched, *other.prompt_token_ids)
    )

    def propose(sequence: SequenceState) -> DraftTree | None:
        done = len(sequence.answer)
        return DraftTree.chain(sequence.root, truth[done : done + 2]) if sequence.request.request_id == "one" else None

    engine.coordinator.propose = propose  # pyright: ignore[reportAttributeAccessIssue]
    poison(engine, truth[place], float("nan"))
    bad, good = run_all(engine, [request("one", prompt), other])
    assert isinstance(bad.end, Failed)
    assert f"not finite at position {len(prompt) + place + 1} " in bad.end.error.message
    assert bad.tokens == truth[: len(bad.tokens)]
    assert place - 2 <= len(bad.tokens) <= place + 1
    assert isinstance(good.end, Finished)
    assert good.tokens == untouched
    assert engine.scheduler.pages.num_used == 0


def test_beside_graphs_a_broken_prompt_ends_alone_too(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    config = config_of(tmp_path, max_batch=2, page_size=64)
    engine = build(config, kernels=PLAIN).engine
    engine.start()
    others = [request("one", (5, 9, 60))]
    truth = [answer.tokens for answer in run_all(engine, others)]
    poison(engine, POISON, float("nan"))
    bad, *rest = run_all(engine, [request("bad", (5, POISON, 60, 7)), *others])
    engine.stop()
    assert isinstance(bad.end, Failed)
    assert [answer.tokens for answer in rest] == truth


def test_log_probs_of_a_prompt_are_numbers_or_an_error(engine: Engine) -> None:
    """One position of the prompt overflows, and nothing behind it does."""
    target: Any = engine.runner.target
    logits = target.logits

    def overflowing(hidden: torch.Tensor) -> torch.Tensor:
        values = logits(hidden)
        if values.shape[0] == 4:
            values[1, 7] = torch.inf
        return values

    target.logits = overflowing
    prompt, other = (5, 9, 60, 7), request("two", (8, 8, 8, 7, 7))
    bad, good = run_all(engine, [request("bad", prompt, num_prompt_log_probs=1), other])
    assert isinstance(bad.end, Failed)
    assert "not finite at position 2 " in bad.end.error.message
    assert isinstance(good.end, Finished)
    assert engine.scheduler.pages.num_used == 0


def test_a_rejected_node_that_breaks_costs_nothing(either: Engine) -> None:
    """Its sibling is the target's token: the answer is what it is without a draft."""
    prompts = [request("one", (5, 9, 60)), request("two", (8, 8, 8, 7))]
    truths = {name: answer.tokens for name, answer in zip(("one", "two"), run_all(either, prompts), strict=True)}

    def propose(sequence: SequenceState) -> DraftTree | None:
        rest = truths[sequence.request.request_id][len(sequence.answer) :][:2]
        if len(rest) < 2 or sequence.request.request_id == "two":
            return DraftTree.chain(sequence.root, rest)
        return DraftTree.from_nodes(sequence.root, [POISON, *rest], [0, 0, 2], [-1.0] * 3)

    either.coordinator.propose = propose  # pyright: ignore[reportAttributeAccessIssue]
    poison(either, POISON, float("nan"))
    assert not any(POISON in tokens for tokens in truths.values())
    one, two = run_all(either, prompts)
    assert one.tokens == truths["one"]
    assert two.tokens == truths["two"]
    assert isinstance(one.end, Finished)
    assert max(map(len, two.chunks)) > 1

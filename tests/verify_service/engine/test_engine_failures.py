"""The device loop when a turn fails: who is told, who goes on, and what is free afterwards."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from draftwood.errors import InternalError
from draftwood.tree import DraftTree
from tests.verify_service.fake_drafter import PATIENCE_S, until
from tests.verify_service.harness import ScriptedDrafter, collect, config_of, run_all
from tests.verify_service.models import save_tiny
from verify_service.build import build
from verify_service.core.events import Event, Failed, Finished
from verify_service.core.request import Request
from verify_service.core.sequence import SequenceState
from verify_service.engine.engine import Engine

NEW_TOKENS = 6


class FaultError(RuntimeError):
    """A fault of ours."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory: Path = tmp_path_factory.mktemp("tiny")
    layers = ["linear_attention", "full_attention"]
    save_tiny("qwen3_5_text", directory, num_hidden_layers=2, layer_types=layers, max_position_embeddings=256)
    return directory


@pytest.fixture
def engine(tiny: Path) -> Iterator[Engine]:
    """Runs one request at a time."""
    engine = build(config_of(tiny, max_batch=1, max_queue=4)).engine
    engine.coordinator = ScriptedDrafter(lambda _: None)  # pyright: ignore[reportAttributeAccessIssue]
    engine.start()
    yield engine
    engine.stop()


def scripted(engine: Engine) -> ScriptedDrafter:
    assert isinstance(engine.coordinator, ScriptedDrafter)
    return engine.coordinator


def request(request_id: str, algorithm: str = "none") -> Request:
    return Request(
        request_id=request_id, prompt_token_ids=(5, 9, 60, 33, 7), max_new_tokens=NEW_TOKENS, algorithm=algorithm
    )


def check_all_is_free(engine: Engine) -> None:
    scheduler = engine.scheduler
    until(lambda: len(engine.scheduler.active) == len(engine.scheduler.waiting) == 0)
    assert (scheduler.pages.num_used, scheduler.slots.num_used) == (0, 0)
    assert (engine.scheduler.pages.num_used, engine.scheduler.slots.num_used) == (0, 0)


def test_a_step_that_fails_spares_the_requests_that_wait(engine: Engine) -> None:
    (truth,) = run_all(engine, [request("truth")])
    are_submitted, num_waiting = threading.Event(), list[int]()

    def propose(sequence: SequenceState) -> DraftTree | None:
        """Fails in the second step, when the others have come out of the command queue."""
        assert are_submitted.wait(PATIENCE_S)
        if len(sequence.answer) == 1:
            return None
        num_waiting.append(len(engine.scheduler.waiting))
        raise FaultError

    scripted(engine).propose = propose
    requests = [request("bad", "ddtree"), request("one"), request("two")]
    queues = [queue.SimpleQueue[Event]() for _ in requests]
    ids = [engine.submit(r, events.put) for r, events in zip(requests, queues, strict=True)]
    are_submitted.set()
    bad, *others = [collect(events) for events in queues]
    assert num_waiting == [2]
    assert isinstance(bad.end, Failed)
    assert isinstance(bad.end.error, InternalError)
    for other in others:
        assert isinstance(other.end, Finished)
        assert other.tokens == truth.tokens
    until(lambda: scripted(engine).closed[-3:] == ids)
    check_all_is_free(engine)


def test_the_drafter_hears_of_a_failed_request_though_none_follows(engine: Engine) -> None:
    def broken(_: SequenceState) -> DraftTree | None:
        raise FaultError

    scripted(engine).propose = broken
    events = queue.SimpleQueue[Event]()
    sequence_id = engine.submit(request("bad", "ddtree"), events.put)
    assert isinstance(collect(events).end, Failed)
    until(lambda: scripted(engine).closed == [sequence_id])
    check_all_is_free(engine)


@pytest.mark.parametrize("stage", ["admit", "prefill", "first_token"])
def test_a_failure_before_the_first_step_ends_its_request_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    (truth,) = run_all(engine, [request("truth")])

    def broken(*_: object) -> None:
        raise FaultError

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, stage, broken)
        (bad,) = run_all(engine, [request("bad")])
    assert isinstance(bad.end, Failed)
    assert isinstance(bad.end.error, InternalError)
    check_all_is_free(engine)
    (good,) = run_all(engine, [request("good")])
    assert good.tokens == truth.tokens


def test_a_failure_before_the_first_step_leaves_no_tensor_behind(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise FaultError

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "first_token", broken)
        run_all(engine, [request(f"bad {i}") for i in range(3)])
    assert not engine.runner._prefill_hidden

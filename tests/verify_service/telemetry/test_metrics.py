"""Alarms of the verify service, as they are exported: over a service of which only the counting parts are there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from draftwood.errors import OverloadedError
from draftwood.telemetry.metrics import MAX_DEPTH_LABEL
from draftwood.tree import DraftTree
from tests.system.scraping import Samples, parse, value
from verify_service.core.events import Tokens
from verify_service.core.stats import SequenceStep, StageTimes
from verify_service.draft.coordinator import DraftCoordinator
from verify_service.draft.types import DroppedResults
from verify_service.step.acceptance_alarm import WINDOW_STEPS
from verify_service.step.observer import StepObserver
from verify_service.telemetry.metrics import Telemetry

TREE = DraftTree.chain(5, [6, 7, 8])
COLLAPSE, MISMATCH = "draftwood_acceptance_collapse", "draftwood_drafter_mismatch"


def is_turning(patience_s: float) -> bool:
    return True


@pytest.fixture
def service() -> Any:
    """Stands where a service stands; its drafter is connected."""
    client = SimpleNamespace(status="ready", stream=object(), dropped=DroppedResults(mismatched=1, late=2))
    scheduler = SimpleNamespace(
        max_queue=4,
        max_batch=2,
        active=[],
        waiting=[],
        pages=SimpleNamespace(num_pages=9, num_used=0),
        slots=SimpleNamespace(num_slots=2, num_used=0),
    )
    engine = SimpleNamespace(
        num_steps=0,
        scheduler=scheduler,
        runner=SimpleNamespace(observer=StepObserver()),
        coordinator=DraftCoordinator(None, SimpleNamespace(), timeout_s=1.0),  # pyright: ignore[reportArgumentType]
        is_turning=is_turning,
    )
    return SimpleNamespace(engine=engine, client=client)


def samples(telemetry: Telemetry) -> Samples:
    return parse(telemetry.instruments.exposition())


def test_collapse_is_an_alarm_while_drafts_are_paid_for(service: Any) -> None:
    telemetry, observer = Telemetry(service.engine, service.client), service.engine.runner.observer
    for _ in range(WINDOW_STEPS - 1):
        observer.step([SequenceStep(TREE, 0, True)], StageTimes())
    assert value(samples(telemetry), COLLAPSE) == 0  # too few to say
    observer.step([SequenceStep(TREE, 0, True)], StageTimes())
    assert value(samples(telemetry), COLLAPSE) == 1
    service.client.stream = None  # nothing is drafted any more
    assert value(samples(telemetry), COLLAPSE) == 0


def test_steps_without_drafts_are_no_collapse(service: Any) -> None:
    telemetry, observer = Telemetry(service.engine, service.client), service.engine.runner.observer
    for _ in range(2 * WINDOW_STEPS):
        observer.step([SequenceStep(DraftTree.root_only(5), 0, True)], StageTimes())
    assert value(samples(telemetry), COLLAPSE) == 0
    assert value(samples(telemetry), "draftwood_sequence_steps_total", kind="fallback") == 2 * WINDOW_STEPS


def test_accepted_tokens_are_counted_at_each_depth_up_to_the_last_label(service: Any) -> None:
    telemetry, observer = Telemetry(service.engine, service.client), service.engine.runner.observer
    deep = DraftTree.chain(5, list(range(MAX_DEPTH_LABEL + 3)))

    def counts(name: str) -> dict[int, float]:
        said = samples(telemetry).items()
        return {int(dict(labels)["depth"]): n for (series, labels), n in said if series == f"draftwood_{name}_total"}

    assert counts("accepted_depth") == counts("drafted_depth") == {1: 0}  # there from the start
    for tree, num_accepted in ((TREE, 0), (TREE, 2), (TREE, 1), (DraftTree.root_only(5), 0)):
        observer.step([SequenceStep(tree, num_accepted, True)], StageTimes())
    assert counts("accepted_depth") == {1: 2, 2: 1}
    assert counts("drafted_depth") == {1: 3, 2: 3, 3: 3}
    observer.step([SequenceStep(deep, MAX_DEPTH_LABEL + 3, True)], StageTimes())
    assert counts("accepted_depth") == {1: 3, 2: 2} | dict.fromkeys(range(3, MAX_DEPTH_LABEL + 1), 1)
    assert counts("drafted_depth") == dict.fromkeys((1, 2, 3), 4) | dict.fromkeys(range(4, MAX_DEPTH_LABEL + 1), 1)


def test_a_drafter_that_does_not_match_is_an_alarm(service: Any) -> None:
    telemetry = Telemetry(service.engine, service.client)
    assert value(samples(telemetry), MISMATCH) == 0
    service.client.status = "mismatch: vocab_size is 101"
    said = samples(telemetry)
    assert value(said, MISMATCH) == 1
    states = {
        state: value(said, "draftwood_drafter_state", state=state) for state in ("ready", "absent", "mismatch", "none")
    }
    assert states == {"ready": 0, "absent": 0, "mismatch": 1, "none": 0}


@pytest.mark.parametrize("status", ["ready", "absent: nothing answers", "refused: no token", "mismatch: vocab_size"])
def test_a_drafter_is_in_one_state(service: Any, status: str) -> None:
    service.client.status = status
    said = {
        name: n
        for name, n in samples(Telemetry(service.engine, service.client)).items()
        if "drafter_state" in str(name)
    }
    assert sum(said.values()) == 1
    assert (
        value(
            samples(Telemetry(service.engine, service.client)),
            "draftwood_drafter_state",
            state=status.partition(":")[0],
        )
        == 1
    )


def test_a_service_without_a_drafter_exports_the_same_series(service: Any) -> None:
    with_drafter = samples(Telemetry(service.engine, service.client)).keys()
    service.client = None
    without = samples(Telemetry(service.engine, service.client))
    assert without.keys() == with_drafter
    assert value(without, "draftwood_drafter_state", state="none") == 1


def test_requests_are_counted_by_what_became_of_them(service: Any) -> None:
    telemetry = Telemetry(service.engine, service.client)
    with pytest.raises(OverloadedError), telemetry.watch():
        raise OverloadedError("full")
    with telemetry.watch() as left:
        left.notice(Tokens((7,)))
    said = samples(telemetry)
    assert value(said, "draftwood_requests_total", outcome="overloaded") == 1
    assert value(said, "draftwood_requests_total", outcome="cancelled") == 1
    assert value(said, "draftwood_time_to_first_token_seconds_count") == 1
    assert value(said, "draftwood_request_seconds_count") == 0

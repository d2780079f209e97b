"""Why steps that wanted a draft had none, and whose trace the drafter is told."""

from __future__ import annotations

from typing import Any

import pytest

from draftwood.v1 import draft_pb2, tree_pb2
from tests.verify_service.fake_drafter import MakeRig, Rig, chain, refusal, result
from verify_service.draft.types import DroppedResults, Fallback, RefusalReason

CAUSES = {
    draft_pb2.REFUSAL_REASON_CACHE_FULL: RefusalReason.CACHE_FULL,
    draft_pb2.REFUSAL_REASON_UNSUPPORTED: RefusalReason.UNSUPPORTED,
    draft_pb2.REFUSAL_REASON_DEADLINE: RefusalReason.DEADLINE,
    draft_pb2.REFUSAL_REASON_INVALID: RefusalReason.INVALID,
}


def fallbacks(rig: Rig) -> dict[Fallback | RefusalReason, int]:
    """What was counted."""
    return {cause: count for cause, count in rig.coordinator.fallbacks.items() if count}


def refused(rig: Rig) -> dict[RefusalReason, int]:
    """Likewise."""
    return {cause: count for cause, count in rig.coordinator.refused_trees.items() if count}


@pytest.mark.parametrize("reason", CAUSES)
def test_a_refusal_is_the_cause_for_its_sequence_alone(make_rig: MakeRig, reason: Any) -> None:
    rig = make_rig(lambda s: refusal(s, reason) if s.sequence_id == 1 else result(s, tree=chain(3)))
    rig.coordinator.draft([rig.sequence(1), rig.sequence(2), rig.sequence(3, algorithm="none")])
    assert fallbacks(rig) == {CAUSES[reason]: 1}
    assert refused(rig) == {CAUSES[reason]: 1}


def test_a_final_refusal_makes_later_steps_undraftable(make_rig: MakeRig) -> None:
    rig = make_rig(lambda s: refusal(s, draft_pb2.REFUSAL_REASON_CACHE_FULL))
    sequence = rig.sequence()
    for _ in range(3):
        rig.coordinator.draft([sequence])
    assert fallbacks(rig) == {RefusalReason.CACHE_FULL: 1, Fallback.UNDRAFTABLE: 2}
    assert refused(rig) == {RefusalReason.CACHE_FULL: 1}


def test_trees_that_cannot_be_used_are_told_apart(make_rig: MakeRig) -> None:
    answers: dict[int, dict[str, Any]] = {
        1: {"tree": tree_pb2.DraftTree(token_ids=b"\0\0\0", parents=b"\0\0", log_probs=b"\0\0\0\0")},
        2: {"tree": chain(3), "base_length": 4},
        3: {"tree": chain()},
        4: {"tree": chain(3)},
    }
    rig = make_rig(lambda s: result(s, **answers[s.sequence_id]))
    rig.coordinator.draft([rig.sequence(number) for number in answers])
    assert fallbacks(rig) == {RefusalReason.MALFORMED: 1, RefusalReason.STALE: 1, Fallback.EMPTY: 1}
    assert refused(rig) == {RefusalReason.MALFORMED: 1}
    assert rig.client.dropped == DroppedResults(rejected=1, mismatched=1)


def test_a_deadline_that_passes_and_the_answer_that_is_outstanding(make_rig: MakeRig) -> None:
    rig = make_rig(timeout_s=0.05)
    rig.fake.gate.clear()
    sequences = [rig.sequence(1), rig.sequence(2)]
    rig.coordinator.draft(sequences)
    assert fallbacks(rig) == {Fallback.TIMEOUT: 2}
    rig.coordinator.draft(sequences)
    assert fallbacks(rig) == {Fallback.TIMEOUT: 2, Fallback.BUSY: 2}
    rig.fake.gate.set()


def test_no_drafter_is_absent(make_rig: MakeRig) -> None:
    rig = make_rig(model={"vocab_size": 101})
    rig.coordinator.draft([rig.sequence()])
    assert fallbacks(rig) == {Fallback.ABSENT: 1}


def test_the_drafter_is_told_whose_trace_a_step_belongs_to(make_rig: MakeRig) -> None:
    rig = make_rig()
    traceparent = f"00-{'1' * 32}-{'2' * 16}-01"
    rig.coordinator.draft([rig.sequence()], traceparent)
    assert rig.request().traceparent == traceparent
    rig.coordinator.draft([rig.sequence()])
    assert rig.request().traceparent == ""

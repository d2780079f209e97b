"""What follows an answer that misses its deadline, and how the drafter learns of sequences that have ended."""

from __future__ import annotations

import time

import pytest

from draftwood.tree import DraftTree
from tests.verify_service.fake_drafter import PATIENCE_S, MakeRig, chain, draft_until, result, until


def test_late_answer_is_never_used(make_rig: MakeRig) -> None:
    """A step goes on without a draft at its deadline; the answer to an old step is not taken for a new one's."""
    rig = make_rig(lambda s: result(s, tree=chain(s.base_length)), timeout_s=0.2)
    rig.fake.gate.clear()
    sequence = rig.sequence(1, 5)
    assert rig.coordinator.draft([sequence]).trees == {}  # the deadline passes
    rig.commit(sequence, 8)
    assert rig.coordinator.draft([sequence]).trees == {}  # one draft is outstanding: nothing is sent
    rig.request()
    assert rig.fake.requests.empty()
    rig.coordinator.timeout_s = PATIENCE_S
    rig.fake.gate.set()
    trees: list[dict[int, DraftTree]] = []
    until(lambda: bool(trees.append(rig.coordinator.draft([sequence]).trees) or trees[-1]))
    assert trees[-1] == {1: DraftTree.chain(sequence.root, [6])}
    rig.check_context(sequence)


def test_results_of_a_late_answer_are_stale_trees(make_rig: MakeRig) -> None:
    """Each of them is counted, once, when it arrives: no further step is needed for it."""
    rig = make_rig(timeout_s=0.01)
    rig.fake.gate.clear()
    assert rig.coordinator.draft([rig.sequence(1), rig.sequence(2)]).trees == {}  # the deadline passes
    assert rig.client.dropped.stale == 0
    rig.fake.gate.set()
    until(lambda: rig.client.dropped.stale > 0)
    rig.coordinator.timeout_s = PATIENCE_S
    assert rig.coordinator.draft([rig.sequence(3)]).trees.keys() == {3}
    assert (rig.client.dropped.rejected, rig.client.dropped.stale) == (0, 2)


def test_closed_sequences_are_told_with_the_next_step(make_rig: MakeRig) -> None:
    rig = make_rig()
    first, second, never = rig.sequence(1), rig.sequence(2), rig.sequence(3)
    rig.coordinator.draft([first, second])
    assert rig.request().closed_sequence_ids == []
    rig.coordinator.close(first)
    rig.coordinator.close(never)  # the drafter has never heard of it
    rig.coordinator.draft([second])
    assert rig.request().closed_sequence_ids == [1]
    rig.coordinator.draft([second])
    assert rig.request().closed_sequence_ids == []


def test_closed_sequences_are_told_where_no_step_follows(make_rig: MakeRig) -> None:
    rig = make_rig()
    sequence = rig.sequence()
    rig.coordinator.draft([sequence])
    rig.request()
    rig.coordinator.close(sequence)
    rig.coordinator.flush()
    message = rig.request()
    assert message.closed_sequence_ids == [1]
    assert not message.sequences
    rig.coordinator.flush()
    assert rig.fake.requests.empty()
    other = rig.sequence(2)  # the empty step's answer is not taken for the next one's
    assert rig.coordinator.draft([other]).trees.keys() == {2}


def test_closed_sequences_are_told_behind_a_late_answer(make_rig: MakeRig) -> None:
    """An idle engine has no further occasion to tell: the id must be on its way though an answer is outstanding."""
    rig = make_rig(timeout_s=0.01)
    rig.fake.gate.clear()
    sequence, other = rig.sequence(1), rig.sequence(2)
    assert rig.coordinator.draft([sequence]).trees == {}  # the deadline passes
    rig.request()
    rig.coordinator.close(sequence)
    rig.coordinator.flush()
    rig.fake.gate.set()
    message = rig.request()
    assert message.closed_sequence_ids == [1]
    assert not message.sequences
    until(lambda: rig.client.dropped.stale > 0)
    rig.coordinator.timeout_s = PATIENCE_S
    assert rig.coordinator.draft([other]).trees.keys() == {2}
    assert rig.request().closed_sequence_ids == []


def test_telling_of_closed_sequences_makes_no_second_step_possible(make_rig: MakeRig) -> None:
    """A late answer stays outstanding whatever is told meanwhile."""
    rig = make_rig(timeout_s=0.01)
    rig.fake.gate.clear()
    sequence, other = rig.sequence(1), rig.sequence(2)
    assert rig.coordinator.draft([sequence, other]).trees == {}  # the deadline passes
    rig.coordinator.close(sequence)
    rig.coordinator.flush()
    assert rig.coordinator.draft([other]).trees == {}
    rig.fake.gate.set()
    until(lambda: rig.client.dropped.stale == 2)
    assert [rig.request().step_id for _ in range(2)] == [1, 2]
    assert rig.fake.requests.empty()


def test_drafter_that_never_answers_loses_its_stream(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(timeout_s=0.01)
    stream = rig.coordinator.stream
    assert stream is not None
    rig.fake.gate.clear()
    sequence = rig.sequence()
    assert rig.coordinator.draft([sequence]).trees == {}  # the deadline passes
    assert stream.is_busy
    assert not stream.is_broken
    monkeypatch.setattr("verify_service.draft.stream.OVERDUE_S", 0.0)
    rig.coordinator.draft([sequence])
    assert stream.is_broken
    rig.fake.gate.set()
    rig.coordinator.timeout_s = PATIENCE_S
    assert draft_until(rig, [sequence], lambda drafts: bool(drafts.trees)).trees.keys() == {1}


def test_answer_that_skips_a_step_ends_the_stream(make_rig: MakeRig) -> None:
    """It would be waited for without end, and every later step would go without a draft."""
    rig = make_rig()
    sequence = rig.sequence()
    rig.fake.skip = 1
    assert rig.coordinator.draft([sequence]).trees == {}
    rig.fake.skip = 0
    assert draft_until(rig, [sequence], lambda drafts: bool(drafts.trees)).trees.keys() == {1}


@pytest.mark.parametrize("busy_us", [2**64 - 1, 2**63, 0])
def test_drafter_cannot_have_been_busy_for_longer_than_the_wait(make_rig: MakeRig, busy_us: int) -> None:
    rig = make_rig()
    rig.fake.busy_us = busy_us
    began = time.perf_counter()
    drafts = rig.coordinator.draft([rig.sequence()])
    assert drafts.trees
    assert 0.0 <= drafts.busy <= time.perf_counter() - began
    assert drafts.transport >= 0.0

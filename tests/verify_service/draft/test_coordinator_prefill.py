"""Large contexts, which go ahead on a Prefill stream: a real client and a scripted drafter on a real port."""

from __future__ import annotations

import grpc
import pytest

from tests.verify_service.fake_drafter import PATIENCE_S, FakeDrafter, MakeRig, Rig, draft_until, until

LONG = 22_000  # rows of 24 bytes: over the limit for one message


def test_large_context_goes_ahead_on_its_own_stream(make_rig: MakeRig) -> None:
    rig = make_rig(num_rows=LONG + 64, model={"max_context": 1 << 20})
    sequence, short = rig.sequence(1, LONG), rig.sequence(2, 5)
    assert rig.coordinator.draft([sequence, short]).trees.keys() == {2}  # the others are not held up
    message = rig.request()
    assert [part.sequence_id for part in message.sequences] == [2]
    chunks = rig.fake.prefilled.get(timeout=PATIENCE_S)
    assert {(c.stream_id, c.sequence_id, c.epoch) for c in chunks} == {(message.stream_id, 1, 1)}
    assert all(c.ByteSize() <= 1 << 20 for c in chunks)
    rig.check_context(sequence)
    rig.commit(sequence, 11, 12)
    draft_until(rig, [sequence], lambda drafts: bool(drafts.trees))
    assert rig.request().sequences[0].context.start == LONG
    rig.check_context(sequence)


def test_large_context_in_several_chunks(make_rig: MakeRig) -> None:
    rig = make_rig(num_rows=2 * LONG + 64, model={"max_context": 1 << 20})
    sequence = rig.sequence(1, 2 * LONG)
    assert rig.coordinator.draft([sequence]).trees == {}
    chunks = rig.fake.prefilled.get(timeout=PATIENCE_S)
    assert len(chunks) > 1
    assert all(c.ByteSize() <= 1 << 20 for c in chunks)
    rig.check_context(sequence)
    draft_until(rig, [sequence], lambda drafts: bool(drafts.trees))


def test_no_draft_is_asked_for_while_context_is_on_its_way(make_rig: MakeRig) -> None:
    """Two streams have no order, and a step that overtook the context would be refused and the context sent again."""
    rig = make_rig(num_rows=LONG + 64, model={"max_context": 1 << 20})
    rig.fake.prefill_gate.clear()
    sequence = rig.sequence(1, LONG)
    for token in (11, 12, 13):
        assert rig.coordinator.draft([sequence]).trees == {}
        rig.commit(sequence, token)
    assert rig.fake.requests.empty()
    rig.fake.prefill_gate.set()
    draft_until(rig, [sequence], lambda drafts: bool(drafts.trees))
    assert rig.fake.prefilled.qsize() == 1
    assert rig.request().sequences[0].context.start == LONG
    rig.check_context(sequence)


def test_context_that_got_lost_on_its_way_is_sent_again(make_rig: MakeRig) -> None:
    rig = make_rig(num_rows=LONG + 64, model={"max_context": 1 << 20})
    rig.fake.prefill_error = grpc.StatusCode.UNAVAILABLE
    sequence = rig.sequence(1, LONG)
    draft_until(rig, [sequence], lambda _: rig.fake.prefilled.qsize() == 2)
    rig.fake.prefill_error = None
    draft_until(rig, [sequence], lambda drafts: bool(drafts.trees))
    rig.check_context(sequence)


def num_prefills(rig: Rig) -> int:
    """Sequences that the stream remembers a Prefill call of."""
    assert rig.coordinator.stream is not None
    return len(rig.coordinator.stream._prefills)


def test_a_closed_sequence_ends_its_prefill(make_rig: MakeRig) -> None:
    """Nobody waits for the context any more: the call is cancelled and forgotten."""
    rig = make_rig(num_rows=LONG + 64, model={"max_context": 1 << 20})
    rig.fake.prefill_gate.clear()
    sequence = rig.sequence(1, LONG)
    assert rig.coordinator.draft([sequence]).trees == {}
    ended = rig.fake.prefill_calls.get(timeout=PATIENCE_S)
    assert num_prefills(rig) == 1
    rig.coordinator.close(sequence)
    rig.coordinator.flush()
    assert num_prefills(rig) == 0
    assert ended.wait(PATIENCE_S)  # the drafter's gate is still shut: only a cancellation ends the call
    assert rig.request().closed_sequence_ids == [1]


def test_a_closed_sequence_leaves_no_trace_of_a_finished_prefill(make_rig: MakeRig) -> None:
    rig = make_rig(num_rows=LONG + 64, model={"max_context": 1 << 20})
    sequence = rig.sequence(1, LONG)
    assert rig.coordinator.draft([sequence]).trees == {}
    rig.fake.prefilled.get(timeout=PATIENCE_S)
    rig.coordinator.close(sequence)
    assert num_prefills(rig) == 0


FINAL = (
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
)


@pytest.mark.parametrize("code", FINAL, ids=lambda code: code.name)
def test_context_that_is_refused_is_not_sent_again(
    make_rig: MakeRig, code: grpc.StatusCode, caplog: pytest.LogCaptureFixture
) -> None:
    """The sequence goes on without drafts, beside others with theirs, and is tried again at the next drafter only."""
    rig = make_rig(num_rows=LONG + 64, model={"max_context": 1 << 20})
    rig.fake.prefill_error = code
    sequence, other = rig.sequence(1, LONG), rig.sequence(2, 5)
    draft_until(rig, [sequence, other], lambda _: not sequence.is_draftable)
    assert caplog.text.count("no more drafts for a sequence: lost") == 1
    rig.fake.prefill_error = None
    for _ in range(3):
        assert rig.coordinator.draft([sequence, other]).trees.keys() == {2}
    assert rig.fake.prefilled.qsize() == 1
    assert num_prefills(rig) == 0
    while not rig.fake.requests.empty():
        assert [part.sequence_id for part in rig.request().sequences] == [2]
    rig.fake.kill()
    until(lambda: rig.coordinator.stream is None)
    rig.fake = FakeDrafter(max_context=1 << 20).start(rig.fake.port)
    draft_until(rig, [sequence], lambda drafts: bool(drafts.trees))
    rig.check_context(sequence)

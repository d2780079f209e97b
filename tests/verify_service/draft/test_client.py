"""The verify side of the draft protocol against a real server with a scripted drafter behind it."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch

from draftwood.rpc.wire import sampling_from_wire
from draftwood.sampling import SamplingParams
from draftwood.tree import DraftTree
from draftwood.v1 import draft_pb2, tree_pb2
from tests.verify_service.fake_drafter import (
    EXPECTED,
    MODEL,
    PATIENCE_S,
    FakeDrafter,
    MakeRig,
    Rig,
    chain,
    draft_until,
    num_rows,
    refusal,
    result,
    until,
)
from verify_service.cache.pools import Pools
from verify_service.draft.client import DraftClient
from verify_service.draft.coordinator import Drafts


@pytest.mark.parametrize("version", [0, 2**32 - 1])
@pytest.mark.parametrize("field", ["protocol_version", "noise_version"])
def test_a_drafter_of_another_version_is_not_asked(make_rig: MakeRig, field: str, version: int) -> None:
    rig = make_rig(model={field: version})
    assert rig.client.status == f"mismatch: {field} is {version} at the drafter fake, {MODEL[field]} here"
    assert rig.coordinator.draft([rig.sequence()]).trees == {}
    assert rig.fake.requests.empty()


def test_drafter_that_does_not_match_is_not_used_until_it_does(make_rig: MakeRig) -> None:
    rig = make_rig(model={"vocab_size": 101})
    assert rig.client.status.startswith("mismatch")
    assert "101" in rig.client.status
    assert rig.coordinator.stream is None
    assert rig.coordinator.draft([rig.sequence()]).trees == {}
    rig.fake.model.vocab_size = 100
    until(lambda: rig.client.status == "ready")
    assert rig.coordinator.stream is not None


def test_a_step_says_all_that_the_contract_asks_for(make_rig: MakeRig) -> None:
    rig = make_rig()
    sampling = SamplingParams(temperature=0.5, top_k=9, top_p=0.75, seed=2**63 + 5)
    sequence = rig.sequence(3, 5, sampling=sampling, spine=True)
    drafts = rig.coordinator.draft([sequence])
    assert drafts.trees == {3: DraftTree.chain(42, [11, 12])}
    assert drafts.busy == 7e-6
    message = rig.request()
    (part,) = message.sequences
    assert message.stream_id != 0
    assert (message.step_id, message.deadline_us) == (1, int(PATIENCE_S * 1e6))
    assert (part.sequence_id, part.epoch, part.base_length, part.root_token_id) == (3, 1, 5, 42)
    assert (part.tree.algorithm, part.tree.tree_budget) == (tree_pb2.ALGORITHM_DDTREE, 7)
    assert (part.tree.width_cap, part.tree.spine) == (4, True)
    assert sampling_from_wire(part.sampling, seed=0, vocab_size=100) == sampling
    assert part.context.start == 0
    rig.check_context(sequence)


def test_the_next_request_is_the_commit(make_rig: MakeRig) -> None:
    """Only new rows travel, whatever was accepted; the cache is the sequence, always."""
    rig = make_rig()
    sequence = rig.sequence(1, 5)
    for start, tokens in ((0, (11, 12, 13)), (5, (50,)), (8, (11, 9)), (9, (1,))):
        assert rig.coordinator.draft([sequence]).trees.keys() == {1}
        part = rig.request().sequences[0]
        assert part.context.start == start
        assert num_rows(part.context) == sequence.base_length - start
        assert part.root_token_id == sequence.root
        rig.check_context(sequence)
        rig.commit(sequence, *tokens)


def test_rows_travel_in_bfloat16(make_rig: MakeRig) -> None:
    rig = make_rig()
    rows = rig.pools.features.bfloat16()
    rig.coordinator.pools = Pools(rows, rows, rows, rows, rows)
    sequence = rig.sequence(1, 5)
    assert rig.coordinator.draft([sequence]).trees
    context = rig.request().sequences[0].context
    assert context.format == draft_pb2.FEATURE_FORMAT_BFLOAT16
    wanted = rows[torch.from_numpy(sequence.slots[:5])].view(torch.int16).numpy().tobytes()
    assert context.features == wanted


def test_only_sequences_that_can_use_a_draft_get_one(make_rig: MakeRig) -> None:
    rig = make_rig()
    plain, last, drafted = rig.sequence(1, algorithm="none"), rig.sequence(2, max_new_tokens=2), rig.sequence(3)
    assert rig.coordinator.draft([plain, last, drafted]).trees.keys() == {3}
    assert [part.sequence_id for part in rig.request().sequences] == [3]
    assert rig.coordinator.draft([plain, last]).trees == {}
    assert rig.fake.requests.empty()


def test_chain_is_cut_to_the_drafters_depth(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.coordinator.draft([rig.sequence(1, algorithm="dflash", tree_budget=63)])
    tree = rig.request().sequences[0].tree
    assert (tree.algorithm, tree.tree_budget) == (tree_pb2.ALGORITHM_DFLASH, 7)


def test_window_of_the_drafter_bounds_the_context(make_rig: MakeRig) -> None:
    rig = make_rig(model={"context_window": 4})
    sequence = rig.sequence(1, 20)
    assert rig.coordinator.draft([sequence]).trees
    context = rig.request().sequences[0].context
    assert context.start == 16
    assert context.features == rig.pools.features[torch.from_numpy(sequence.slots[16:20])].numpy().tobytes()


def test_incomplete_context_is_replayed_from_where_it_ends(make_rig: MakeRig) -> None:
    rig = make_rig()
    sequence = rig.sequence(1, 9)
    assert rig.coordinator.draft([sequence]).trees
    rig.request()
    epoch, rows = rig.fake.cache.rows[1]
    rig.fake.cache.rows[1] = epoch, rows[:4]  # the drafter lost some
    rig.commit(sequence, 11, 12)
    assert rig.coordinator.draft([sequence]).trees == {}
    assert rig.request().sequences[0].context.start == 9
    assert rig.coordinator.draft([sequence]).trees.keys() == {1}
    assert rig.request().sequences[0].context.start == 4
    rig.check_context(sequence)


FINAL = (
    draft_pb2.REFUSAL_REASON_CACHE_FULL,
    draft_pb2.REFUSAL_REASON_UNSUPPORTED,
    draft_pb2.REFUSAL_REASON_INVALID,
    draft_pb2.REFUSAL_REASON_UNSPECIFIED,
)


@pytest.mark.parametrize("reason", FINAL)
def test_no_more_drafts_after_a_final_refusal(make_rig: MakeRig, reason: Any, caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig(lambda s: refusal(s, reason) if s.sequence_id == 1 else result(s, tree=chain(3)))
    full, other = rig.sequence(1), rig.sequence(2)
    with caplog.at_level(logging.WARNING):
        assert rig.coordinator.draft([full, other]).trees.keys() == {2}
    assert "because" in caplog.text
    rig.request()
    rig.commit(other, 3)
    assert rig.coordinator.draft([full, other]).trees.keys() == {2}
    assert [part.sequence_id for part in rig.request().sequences] == [2]


def test_refused_deadline_is_tried_again(make_rig: MakeRig) -> None:
    rig = make_rig(lambda s: refusal(s, draft_pb2.REFUSAL_REASON_DEADLINE))
    sequence = rig.sequence()
    assert rig.coordinator.draft([sequence]).trees == {}
    rig.fake.answer = lambda s: result(s, tree=chain(3))
    assert rig.coordinator.draft([sequence]).trees.keys() == {1}


def test_drafter_that_dies_is_done_without_and_comes_back(make_rig: MakeRig) -> None:
    """Its successor gets every sequence as new: next epoch, whole context."""
    rig = make_rig()
    first, second = rig.sequence(1, 5), rig.sequence(2, 8)
    assert rig.coordinator.draft([first, second]).trees.keys() == {1, 2}
    stream = rig.request().stream_id
    rig.fake.kill()
    until(lambda: rig.client.status.startswith("absent"))
    rig.commit(first, 11, 12, 13)
    assert rig.coordinator.draft([first, second]).trees == {}
    rig.coordinator.close(second)
    rig.coordinator.flush()  # nobody to tell
    successor = FakeDrafter().start(rig.fake.port)
    rig.fake = successor
    draft_until(rig, [first], lambda drafts: bool(drafts.trees))
    until(lambda: rig.client.status == "ready")
    message = rig.request()
    assert message.stream_id != stream
    assert message.closed_sequence_ids == []
    (part,) = message.sequences
    assert (part.epoch, part.context.start, part.base_length) == (2, 0, 8)
    rig.check_context(first)


def test_drafter_that_dies_in_mid_step_costs_no_deadline(make_rig: MakeRig) -> None:
    """Whoever waits for the answer is woken when the stream breaks, not at the deadline."""
    rig = make_rig(timeout_s=100.0)
    rig.fake.gate.clear()
    outcomes: list[Drafts] = []
    step = threading.Thread(target=lambda: outcomes.append(rig.coordinator.draft([rig.sequence()])))
    step.start()
    rig.request()
    rig.fake.dies = True
    rig.fake.gate.set()
    step.join(PATIENCE_S)
    assert not step.is_alive()
    assert outcomes[0].trees == {}


def test_a_final_refusal_ends_with_the_drafter(make_rig: MakeRig) -> None:
    rig = make_rig(lambda s: refusal(s, draft_pb2.REFUSAL_REASON_CACHE_FULL))
    sequence = rig.sequence()
    assert rig.coordinator.draft([sequence]).trees == {}
    assert not sequence.is_draftable
    rig.fake.kill()
    until(lambda: rig.coordinator.stream is None)
    rig.fake = FakeDrafter().start(rig.fake.port)
    assert draft_until(rig, [sequence], lambda drafts: bool(drafts.trees)).trees.keys() == {1}


def test_absent_drafter_is_said_and_looked_for(make_rig: MakeRig) -> None:
    fake = FakeDrafter().start()
    fake.kill()
    rig = Rig(fake)
    try:
        assert rig.client.status.startswith("absent")
        assert str(fake.port) in rig.client.status
        assert rig.coordinator.draft([rig.sequence()]).trees == {}
        fake.start(fake.port)
        until(lambda: rig.coordinator.stream is not None)
        assert rig.coordinator.draft([rig.sequence()]).trees
    finally:
        rig.client.stop()
        fake.kill()


def test_stream_ends_with_the_client(make_rig: MakeRig) -> None:
    """The drafter frees what it holds when the stream ends."""
    rig = make_rig()
    rig.coordinator.draft([rig.sequence()])
    rig.client.stop()
    assert rig.fake.ended.wait(PATIENCE_S)


def test_a_stop_while_the_drafter_is_asked_who_it_is_ends_the_stream_too(make_rig: MakeRig) -> None:
    rig = make_rig()
    client = DraftClient(f"127.0.0.1:{rig.fake.port}", EXPECTED)
    asked, goes_on, connect = threading.Event(), threading.Event(), client._connect

    def slowly(channel: Any) -> Any:
        asked.set()
        assert goes_on.wait(PATIENCE_S)
        return connect(channel)

    client._connect = slowly
    client.start()
    assert asked.wait(PATIENCE_S)
    stop = threading.Thread(target=client.stop)
    stop.start()
    until(client._stopping.is_set)
    goes_on.set()
    stop.join(PATIENCE_S)
    assert not client._thread.is_alive()

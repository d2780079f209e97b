"""Results of a drafter that cannot be used: malformed trees, and those of another state of their sequence."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from draftwood.v1 import tree_pb2
from tests.verify_service.fake_drafter import MakeRig, chain, result


def wire(token_ids: list[int], parents: list[int], log_probs: list[float] | None = None) -> tree_pb2.DraftTree:
    values = [-1.0] * len(token_ids) if log_probs is None else log_probs
    arrays = np.array(token_ids, "<i4"), np.array(parents, "<i2"), np.array(values, "<f4")
    return tree_pb2.DraftTree(token_ids=arrays[0].tobytes(), parents=arrays[1].tobytes(), log_probs=arrays[2].tobytes())


MALFORMED = {
    "lengths differ": wire([1, 2], [0]),
    "ragged bytes": tree_pb2.DraftTree(token_ids=b"\0\0\0", parents=b"\0\0", log_probs=b"\0\0\0\0"),
    "parent after child": wire([1, 2], [0, 2]),
    "own parent": wire([1], [1]),
    "negative parent": wire([1], [-1]),
    "token too large": wire([100], [0]),
    "token negative": wire([-1], [0]),
    "repeats a sibling": wire([1, 1], [0, 0]),
    "over budget": wire(list(range(8)), [0] * 8),
    "too deep": wire(list(range(8)), list(range(8))),
    "not a number": wire([1], [0], [float("nan")]),
    "infinite": wire([1], [0], [float("-inf")]),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_tree_is_rejected_and_counted(make_rig: MakeRig, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig(lambda s: result(s, tree=MALFORMED[kind] if s.sequence_id == 1 else chain(5)))
    budget = 8 if kind == "too deep" else 7
    bad, good = rig.sequence(1, tree_budget=budget), rig.sequence(2)
    with caplog.at_level(logging.WARNING):
        drafts = rig.coordinator.draft([bad, good])
    assert drafts.trees.keys() == {2}  # the neighbour keeps its tree
    assert (rig.client.dropped.rejected, rig.client.dropped.stale) == (1, 0)
    assert "rejected a tree" in caplog.text
    rig.fake.answer = lambda s: result(s, tree=chain(6))
    rig.commit(bad, 1)
    assert rig.coordinator.draft([bad, good]).trees.keys() == {1, 2}  # and the next one is welcome


@pytest.mark.parametrize("change", [{"epoch": 9}, {"base_length": 4}, {"root_token_id": 41}, {"sequence_id": 77}])
def test_stale_tree_is_dropped_and_counted(make_rig: MakeRig, change: dict[str, int]) -> None:
    rig = make_rig(lambda s: result(s, tree=chain(11), **change))
    sequence = rig.sequence()
    assert rig.coordinator.draft([sequence]).trees == {}
    assert (rig.client.dropped.rejected, rig.client.dropped.stale) == (0, 1)
    rig.fake.answer = lambda s: result(s, tree=chain(11))
    assert rig.coordinator.draft([sequence]).trees.keys() == {1}
    rig.check_context(sequence)


@pytest.mark.parametrize("is_left_out", [False, True])
def test_no_outcome_is_no_tree(make_rig: MakeRig, is_left_out: bool) -> None:
    rig = make_rig(lambda s: None if is_left_out else result(s))
    assert rig.coordinator.draft([rig.sequence()]).trees == {}

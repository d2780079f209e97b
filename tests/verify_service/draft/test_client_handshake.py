"""What a drafter must say of itself before it is used."""

from __future__ import annotations

from typing import Any

import pytest

from draftwood.errors import ModelMismatchError
from draftwood.v1 import draft_pb2
from tests.verify_service.fake_drafter import EXPECTED, MODEL
from verify_service.draft.client import Expected, check_handshake
from verify_service.draft.types import DrafterFacts

WRONG: dict[str, Any] = {
    "target_layer_ids": [1, 5],
    "hidden_size": 7,
    "vocab_size": 101,
    "tokenizer_hash": "cc",
    "projection_checksum": "dd",
    "protocol_version": 999,
    "noise_version": 998,
}
VERSIONS = ("protocol_version", "noise_version")


def model_with(**changes: Any) -> draft_pb2.DraftModel:
    return draft_pb2.DraftModel(**(MODEL | changes))


@pytest.mark.parametrize("field", WRONG)
def test_mismatch_names_the_field_and_both_values(field: str) -> None:
    with pytest.raises(ModelMismatchError) as caught:
        check_handshake(EXPECTED, model_with(**{field: WRONG[field]}))
    assert caught.value.field == field
    for part in (field, str(WRONG[field]), str(MODEL[field]), "fake"):
        assert part in caught.value.message


@pytest.mark.parametrize("field", VERSIONS)
def test_a_drafter_that_says_no_version_does_not_match(field: str) -> None:
    with pytest.raises(ModelMismatchError, match=f"{field} is 0 at the drafter fake, {MODEL[field]} here"):
        check_handshake(EXPECTED, model_with(**{field: 0}))


@pytest.mark.parametrize("side", ["drafter", "target"])
def test_without_a_tokenizer_nothing_is_compared(side: str) -> None:
    ours = "" if side == "target" else "aa"
    theirs = "" if side == "drafter" else "cc"
    expected = Expected((1, 4), 6, 100, ours, "bb")
    facts = check_handshake(expected, model_with(tokenizer_hash=theirs))
    assert facts == DrafterFacts("fake", vocab_size=100, max_depth=7, context_window=0)

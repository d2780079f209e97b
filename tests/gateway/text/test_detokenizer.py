"""Incremental text equals the text of all ids at once, minus a character that the end cuts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from draftwood.config import GatewayConfig
from gateway.api.served_model import ServedModel
from gateway.generation.answer import Answer, Limits
from gateway.text.detokenizer import MAX_WAITING, ByteDetokenizer, WindowDetokenizer, new_detokenizer
from gateway.text.tokenizer import Tokenizer

SPROUT = ServedModel.load(GatewayConfig()).tokenizer
TEXTS = st.text(
    alphabet=st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("aé你🦊🏳️‍🌈 \n")), max_size=40
)


def sentencepiece_like() -> Tokenizer:
    """A vocabulary of the other kind: bytes as <0xNN>, spaces as ▁, the first space stripped, a start token added."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgh", "ab", "▁a", "▁ab"]
    definition: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": pieces[i], "special": True, "normalized": False, "single_word": False}
            | {"lstrip": False, "rstrip": False}
            for i in range(3)
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "byte_fallback": True,
            "fuse_unk": True,
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": ["a b", "▁ a", "▁ ab"],
        },
    }
    return Tokenizer(json.dumps(definition), {"bos_token": {"content": "<s>"}, "eos_token": "</s>"})


PIECES = sentencepiece_like()
BYTE = 3  # the id of <0x00>


def incremental(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = new_detokenizer(tokenizer)
    return "".join(map(detokenizer.push, ids))


@given(TEXTS)
@example("🦊")
def test_every_cut_of_a_text(text: str) -> None:
    """Field bug 7: for valid text nothing but the cut character is missing, and no replacement character appears."""
    ids = SPROUT.encode(text)
    detokenizer = new_detokenizer(SPROUT)
    so_far = ""
    for i, token_id in enumerate(ids):
        so_far += detokenizer.push(token_id)
        assert text.startswith(so_far)
        whole = SPROUT.decode(ids[: i + 1])
        assert whole in (so_far, so_far + "\ufffd")
    assert so_far == text == SPROUT.decode(ids)


@given(st.lists(st.integers(0, 8191), max_size=40))
@example([3, 2, 1, 0])
def test_any_ids(ids: list[int]) -> None:
    """Bytes that are no character, special tokens: as the library decodes them, less a cut character at the end."""
    assert SPROUT.decode(ids) in endings(incremental(SPROUT, ids))


@given(st.lists(st.integers(4, 259), max_size=30))
def test_any_bytes(ids: list[int]) -> None:
    """The tokens of single bytes."""
    assert SPROUT.decode(ids) in endings(incremental(SPROUT, ids))


def endings(text: str) -> tuple[str, str, str]:
    """What the library may make of a cut end: nothing, one sign, or two, where the first half of a surrogate is left,
    which Python's decoder waits at and the library takes for two faulty bytes."""
    return text, text + "\ufffd", text + "\ufffd\ufffd"


@given(TEXTS)
def test_vocabularies_that_are_not_byte_level(text: str) -> None:
    ids = PIECES.encode(text)
    assert incremental(PIECES, ids).rstrip("\ufffd") == PIECES.decode(ids).rstrip("\ufffd")


def test_kinds() -> None:
    assert isinstance(new_detokenizer(SPROUT), ByteDetokenizer)
    assert isinstance(new_detokenizer(PIECES), WindowDetokenizer)


def test_a_character_of_byte_tokens_comes_whole() -> None:
    ids = PIECES.encode("ab 🦊 h")
    detokenizer = new_detokenizer(PIECES)
    parts = [detokenizer.push(token_id) for token_id in ids]
    assert "🦊" in parts
    assert "".join(parts) == "ab 🦊 h"


def test_a_character_that_was_given_out_stays() -> None:
    """The library reads a run of byte tokens as a whole: with a wrong one behind it, "(" is no character for it."""
    ids = [BYTE + 0x28, BYTE + 0x81, *PIECES.encode("g")[1:]]
    assert PIECES.decode(ids) == "\ufffd\ufffdg"
    assert incremental(PIECES, ids) == "(\ufffdg"


def test_what_gives_no_text_does_not_pile_up() -> None:
    detokenizer = WindowDetokenizer(PIECES)
    parts = [detokenizer.push(token_id) for token_id in [2, BYTE + 0x80] * (4 * MAX_WAITING)]
    assert "".join(parts) == "\ufffd" * (4 * MAX_WAITING)
    assert len(detokenizer._window) <= 2 * MAX_WAITING


def test_ids_without_a_token_are_nothing() -> None:
    assert incremental(SPROUT, [300, 100_000]) == SPROUT.decode([300])


@given(
    st.lists(st.integers(4, 8191), max_size=30),
    st.lists(st.integers(1, 7), min_size=1),
    st.lists(st.text("abcdeinorst ", min_size=1, max_size=3), max_size=3),
    st.integers(1, 30),
    st.integers(0, 5),
)
def test_the_answer_does_not_depend_on_chunks(
    ids: list[int], sizes: list[int], stops: list[str], max_tokens: int, min_tokens: int
) -> None:
    limits = Limits(max_tokens, min_tokens, frozenset({300, 301}), tuple(stops))
    one, many = Answer(SPROUT, limits), Answer(SPROUT, limits)
    text = one.push(ids).text + one.finish("length").text
    parts: list[str] = []
    start = 0
    for size in sizes * len(ids):
        parts.append(many.push(ids[start : start + size]).text)
        start += size
    parts.append(many.finish("length").text)
    assert "".join(parts) == text
    assert (one.finish_reason, one.num_tokens) == (many.finish_reason, many.num_tokens)
    if not stops:
        kept = ids[: one.num_tokens - (one.finish_reason == "stop")]
        assert SPROUT.decode(kept) in (text, text + "\ufffd")


@pytest.mark.parametrize("token_id", [0, 300, 5000, 8191])
def test_token_text(token_id: int) -> None:
    assert SPROUT.token_text(token_id).encode("utf-8", "ignore")

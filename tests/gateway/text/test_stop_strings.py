"""Stop strings against a definition that looks at the text character by character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.stop_strings import StopStrings

STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


def before_first_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the stop string that is completed first, the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(st.lists(st.text("abcd", max_size=5), max_size=8), STOPS)
def test_any_cut_of_a_text(parts: list[str], stops: list[str]) -> None:
    expected, is_hit = before_first_stop("".join(parts), stops)
    matcher, given_out, was_hit = StopStrings(stops), "", False
    for part in parts:
        text, was_hit = matcher.push(part)
        given_out += text
        assert expected.startswith(given_out)  # never more than is certain
        if was_hit:
            break
    assert (given_out + matcher.flush(), was_hit) == (expected, is_hit)


@given(st.text("abcd", max_size=20), STOPS)
def test_nothing_is_held_without_need(text: str, stops: list[str]) -> None:
    matcher = StopStrings(stops)
    given_out, is_hit = matcher.push(text)
    held = matcher.flush()
    assert is_hit or held == "" or any(stop.startswith(held) for stop in stops)
    assert is_hit or given_out + held == text


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("Xabcdefg", ["X"], ""),
        ("... ABCDEFGHIJ", ["DEFGHIJ"], "... ABC"),
        ("abcd", ["abcd", "bc"], "a"),
        ("aab", ["ab", "aab"], ""),
        ("naïve 🦊!", ["🦊"], "naïve "),
    ],
)
def test_examples(text: str, stops: list[str], expected: str) -> None:
    assert StopStrings(stops).push(text) == (expected, True)


def test_without_stop_strings() -> None:
    assert StopStrings([]).push("abc") == ("abc", False)

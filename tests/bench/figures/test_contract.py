"""Which differences from the reference count as failures."""

from __future__ import annotations

from bench.exact import Comparison, listing, report
from bench.figures.contract import NOISE, differences, first_difference
from bench.figures.values import Configuration, Judgement

CLEAR = 5.0


def agrees(token_id: int) -> Judgement:
    return Judgement(token_id, 20.0, 20.0 - CLEAR, 20.0)


def prefers(best_id: int, *, second: float, chosen: float) -> Judgement:
    return Judgement(best_id, 20.0, 20.0 - second, 20.0 - chosen)


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2, 3], [1, 2]) == 2


def test_a_close_call_is_listed_and_no_failure() -> None:
    judged = [agrees(1), prefers(9, second=1e-5, chosen=1e-5), agrees(3)]
    found = differences([1, 2, 3], [1, 9, 4], judged, dtype="float32")
    assert [(d.position, d.token_id, d.reference_id) for d in found] == [(1, 2, 9)]
    assert not found[0].is_failure


def test_a_clear_call_is_a_failure() -> None:
    found = differences([1, 2], [1, 9], [agrees(1), prefers(9, second=0.5, chosen=0.5)], dtype="float32")
    assert [d.is_failure for d in found] == [True]


def test_the_gap_that_counts_is_that_of_the_token_chosen() -> None:
    judged = [prefers(9, second=1e-5, chosen=2.0)]  # the two best are close, but the answer has a third
    assert differences([2], [9], judged, dtype="float32")[0].is_failure


def test_later_positions_are_judged_by_the_answers_own_tokens() -> None:
    judged = [prefers(9, second=1e-5, chosen=1e-5), agrees(2), prefers(7, second=1.0, chosen=1.0)]
    found = differences([1, 2, 3], [9, 5, 5], judged, dtype="float32")
    assert [(d.position, d.is_failure) for d in found] == [(0, False), (2, True)]


def test_a_difference_from_step_by_step_decoding_is_listed_even_where_the_pass_sides_with_the_answer() -> None:
    close = Judgement(2, 20.0, 20.0 - 1e-5, 20.0)
    found = differences([2], [9], [close], dtype="float32")
    assert [(d.reference_id, d.is_failure) for d in found] == [(9, False)]
    assert differences([2], [9], [agrees(2)], dtype="float32")[0].is_failure


def test_an_end_at_another_place_is_a_failure() -> None:
    short = differences([1], [1, 2], [agrees(1)], dtype="bfloat16")
    assert [(d.position, d.token_id, d.reference_id, d.is_failure) for d in short] == [(1, None, 2, True)]
    long = differences([1, 2], [1], [agrees(1), agrees(2)], dtype="bfloat16")
    assert [(d.position, d.token_id, d.reference_id, d.is_failure) for d in long] == [(1, 2, None, True)]


def test_noise_follows_the_number_format() -> None:
    judged = [prefers(9, second=0.3, chosen=0.3)]
    assert differences([1], [9], judged, dtype="float32")[0].is_failure
    assert not differences([1], [9], judged, dtype="bfloat16")[0].is_failure
    assert NOISE["float32"] < NOISE["float16"] < NOISE["bfloat16"]


def test_the_exit_code() -> None:
    close = differences([2], [9], [prefers(9, second=1e-5, chosen=1e-5)], dtype="float32")
    clear = differences([2], [9], [prefers(9, second=1.0, chosen=1.0)], dtype="float32")
    tree = Configuration("ddtree", 15)
    good = Comparison(tree, 1, 3, 30, [(0, close[0])])
    bad = Comparison(tree, 8, 3, 30, [(2, clear[0])])
    assert report([good], "float32") == 0
    assert report([good, bad], "float32") == 1
    lines = list(listing([good, bad]))
    assert lines[0].startswith("ddtree 15, 1 at once, prompt 1, token 1: 2, not 9")
    assert lines[1].endswith("FAILURE")

"""The alarm for drafts that are paid for and give nothing."""

from __future__ import annotations

import logging
from itertools import chain, cycle, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify_service.step.acceptance_alarm import (
    COLLAPSED_BELOW,
    RECOVERED_ABOVE,
    WINDOW_STEPS,
    AcceptanceAlarm,
    is_collapsed,
)


@pytest.mark.parametrize("was", [False, True])
def test_a_window_that_is_not_full_changes_nothing(was: bool) -> None:
    assert is_collapsed(WINDOW_STEPS - 1, 0, was_collapsed=was) is was


@pytest.mark.parametrize(
    ("tokens_per_step", "was", "is_now"),
    [
        (1.0, False, True),
        (1.03, False, True),  # what a drafter with the wrong weights was seen to give
        (1.15, False, False),
        (1.15, True, True),  # between the limits: no flapping
        (1.5, True, False),
        (4.6, False, False),
    ],
)
def test_limits(tokens_per_step: float, was: bool, is_now: bool) -> None:
    num_accepted = round((tokens_per_step - 1) * WINDOW_STEPS)
    assert is_collapsed(WINDOW_STEPS, num_accepted, was_collapsed=was) is is_now


# Patterns, each over and over: drawing hundreds of numbers one by one takes longer than what is tested.
STRETCHES = st.tuples(
    st.lists(st.integers(0, 2), min_size=1, max_size=7), st.integers(WINDOW_STEPS // 4, WINDOW_STEPS // 2)
).map(lambda drawn: list(islice(cycle(drawn[0]), drawn[1])))


@given(st.lists(STRETCHES, min_size=4, max_size=6))
def test_only_the_last_window_counts(layer_groups: list[list[int]]) -> None:
    """The alarm's state is what the function says of the windows one after the other."""
    accepted = list(chain.from_iterable(layer_groups))
    alarm, expected = AcceptanceAlarm(), False
    for i, count in enumerate(accepted, start=1):
        alarm.add(count)
        window = accepted[max(0, i - WINDOW_STEPS) : i]
        expected = is_collapsed(len(window), sum(window), was_collapsed=expected)
    assert alarm.is_on is expected


def test_it_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    alarm = AcceptanceAlarm()
    for _ in range(3 * WINDOW_STEPS):
        alarm.add(0)
    assert alarm.is_on
    for _ in range(WINDOW_STEPS):
        alarm.add(3)
    assert not alarm.is_on
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0].startswith("acceptance has collapsed: 1.00 tokens per step over the last 256 drafted steps")
    assert said[1].startswith("acceptance has recovered: 1.26 tokens per step")
    assert COLLAPSED_BELOW < RECOVERED_ABOVE

"""One check of ranges: who passes, who does not, and the words of the message."""

from __future__ import annotations

import math

import pytest

from draftwood.errors import ConfigError, InvalidRequestError
from draftwood.ranges import check_range


@pytest.mark.parametrize("value", [None, 1, 2, 2.5, 3])
def test_inside(value: float | None) -> None:
    check_range("it", value, 1, 3)


@pytest.mark.parametrize("value", [0, 4, -math.inf, math.inf, math.nan])
def test_outside(value: float) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_range("it", value, 1, 3)
    assert (caught.value.message, caught.value.field) == (f"it is {value}, not in [1, 3]", "it")


def test_an_open_end() -> None:
    check_range("it", 1e-9, 0.0, 1.0, is_low_open=True)
    with pytest.raises(InvalidRequestError, match=r"it is 0, not in \(0.0, 1.0\]"):
        check_range("it", 0, 0.0, 1.0, is_low_open=True)


def test_no_end() -> None:
    check_range("it", 10**400, 1)
    for value in (0, math.nan):
        with pytest.raises(InvalidRequestError, match=f"it is {value}, not at least 1"):
            check_range("it", value, 1)


def test_a_setting_is_named_as_its_flag_and_a_long_number_is_shortened() -> None:
    with pytest.raises(ConfigError) as caught:
        check_range("--port", 10**400, 0, 65_535, field="port", error=ConfigError)
    assert caught.value.message == f"--port is 1{'0' * 79}…, not in [0, 65535]"
    assert caught.value.field == "port"

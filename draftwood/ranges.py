"""The one check of a number's range, with the one wording of what is wrong with it."""

from __future__ import annotations

from draftwood.errors import ConfigError, InvalidRequestError

MAX_SHOWN = 80  # characters of a number that a message repeats


def check_range(
    name: str,
    value: float | None,
    low: float,
    high: float | None = None,
    *,
    field: str | None = None,
    is_low_open: bool = False,
    error: type[ConfigError | InvalidRequestError] = InvalidRequestError,
) -> None:
    """Raises `error` unless the value is absent or in [low, high]; with `is_low_open`, in (low, high]. NaN never is.

    `name` is what the message calls the value; the error's field is `field`, where that has another name.
    """
    if value is None or ((low < value if is_low_open else low <= value) and (high is None or value <= high)):
        return
    text = str(value)
    shown = text[:MAX_SHOWN] + "…" if len(text) > MAX_SHOWN else text
    limits = f"at least {low}" if high is None else f"in {'(' if is_low_open else '['}{low}, {high}]"
    raise error(f"{name} is {shown}, not {limits}", field=field or name)

"""What is refused and how that is worded: values as JSON, shortened; counts; fields that are known but not served."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any, cast

from draftwood.errors import InvalidRequestError

MAX_SHOWN = 80  # characters of a wrong value that an error repeats
MAX_WARNED = 256  # distinct unknown fields that are warned of; names come from clients and must not pile up

log = logging.getLogger(__name__)

_encoder = json.JSONEncoder(ensure_ascii=False, default=repr)


def show(value: Any) -> str:
    """A value for a message: the JSON that the client wrote, shortened."""
    if isinstance(value, str):
        value = value[: MAX_SHOWN + 1]
    text = ""
    for part in _encoder.iterencode(value):  # lazily, so that values nested or long beyond reason cost nothing
        text += part
        if len(text) > MAX_SHOWN:
            return text[:MAX_SHOWN] + "…"
    return text


def check_count(name: str, entries: Any, limit: int) -> None:
    """Raises InvalidRequestError if a list or an object has more entries than the limit."""
    if isinstance(entries, list | dict) and len(cast("list[Any]", entries)) > limit:
        count = len(cast("list[Any]", entries))
        raise InvalidRequestError(f"{name} has {count} entries, more than {limit}", field=name)


def neutral(*values: Any) -> tuple[Any, ...]:
    """Values of a field that ask for nothing."""
    return (None, False, *values)


def refuse(data: Any, unsupported: Mapping[str, tuple[Any, ...]]) -> Any:
    """Passes the data on unless it asks for something that is not served."""
    if isinstance(data, dict):
        for name, values in unsupported.items():
            value: Any = cast("dict[str, Any]", data).get(name)
            if not _is_one_of(value, values):
                raise InvalidRequestError(f"{name} is {show(value)}; this server does not serve it", field=name)
    return cast("Any", data)


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Python takes false for 0; JSON does not, and where 0 asks for something it must not pass for false."""
    return any(value == entry and isinstance(value, bool) == isinstance(entry, bool) for entry in values)


class UnknownFields:
    """Remembers which unknown fields requests had, to warn of each once: it may be a typing error."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def warn(self, names: Iterable[str]) -> None:
        """One line in the log for each name that has not come before."""
        for name in map(show, names):
            if len(self._names) >= MAX_WARNED:
                return
            if name not in self._names:
                self._names.add(name)
                log.warning("the request field %s is not known and is ignored", name)

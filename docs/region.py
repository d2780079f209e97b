"""The part of a document that a script writes, between two comments that name it."""

from __future__ import annotations


def markers(name: str) -> tuple[str, str]:
    """The comments before and after the region."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def rewritten(text: str, name: str, inner: str) -> str:
    """The text with the region replaced. Raises ValueError where the comments are not there once and in order."""
    first, last = markers(name)
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end or first in rest or last in after:
        raise ValueError(f"{first} and {last} are not there once and in order")
    return f"{before}{first}\n{inner}\n{last}{after}"

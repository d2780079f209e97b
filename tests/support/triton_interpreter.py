"""Triton's interpreter without two things that take half of its time and change nothing that it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from triton.runtime import interpreter


def spare_needless_work() -> None:
    """For the rest of the process."""
    _skip_unread_overflows()
    _patch_once_a_launch()


def _skip_unread_overflows() -> None:
    """Every sum and product of integers is repeated in 64 bits for an assertion that without `debug` is dropped."""
    builder: Any = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_once_a_launch() -> None:
    """Puts the interpreter's functions into Triton's language at a launch, and not at each call of a device function.

    A second pass over the same modules finds what the first one has put there.
    """
    patch: Callable[[Any], Any] = interpreter._patch_lang
    patched: set[str] = set()

    def patch_lang(function: Any) -> Any:
        if function.__module__ in patched:
            return None  # calls of device functions ask for nothing
        patched.add(function.__module__)
        scope = patch(function)
        restore = scope.restore

        def restore_all() -> None:
            patched.clear()
            restore()

        scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_lang

"""Calls of compiled graphs without the checks in front of them.

A call of a compiled function goes through guards and wrappers in Python before it reaches its graph: 0.1 ms, and four
times that where a step's weights have pushed them out of the processor's caches. The first call with a key goes that
way and is watched; later ones with the same key hand their tensors straight to the graph that served it. The key must
say all that the choice of a graph depends on: shapes, and which weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

MAX_KEYS = 1024


@dataclass(frozen=True, slots=True)
class _Seen:
    """A graph's call."""

    graph: Callable[[list[Any]], Any]
    inputs: list[Any]
    outputs: Sequence[Any]


@dataclass(frozen=True, slots=True)
class _Direct:
    """A graph, and its inputs but for those that vary: (place among the inputs, place among the varying ones)."""

    graph: Callable[[list[Any]], Any]
    inputs: list[Any]
    places: tuple[tuple[int, int], ...]
    size_places: tuple[tuple[int, int], ...] = ()


class CompiledCallCache:
    """Remembers graphs by key. One thread calls at a time."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Direct | None] = {}
        self._seen_once: dict[Hashable, tuple[_Direct, tuple[int, ...]]] = {}

    def call(
        self,
        key: Hashable,
        varying: Sequence[Tensor],
        run: Callable[[], list[Tensor] | None],
        constants: Callable[[], Iterable[Tensor]] = tuple,
        sizes: tuple[int, ...] = (),
    ) -> list[Tensor] | None:
        """What `run` returns, a compiled function's call: a list of its graph's outputs, or None where it only changes
        its inputs. `varying` are tensors that it may read and that differ between calls with one key; all others are
        among `constants`. `sizes` are those that may differ, too, without another graph: calls go by the checks until
        two of them have shown which of the graph's numbers they are."""
        if key in self._known:
            known = self._known[key]
            if known is None:
                return run()
            inputs = known.inputs.copy()
            for place, which in known.places:
                inputs[place] = varying[which]
            for place, which in known.size_places:
                inputs[place] = sizes[which]
            return known.graph(inputs) or None
        with _watched() as seen:
            outputs = run()
        if len(self._known) >= MAX_KEYS:
            self._known.clear()
            self._seen_once.clear()
        found = _direct(seen, outputs, varying, constants()) if seen else None
        if found is None or not sizes:
            self._known[key] = found
        elif (first := self._seen_once.get(key)) is None or any(a == b for a, b in zip(first[1], sizes, strict=True)):
            self._seen_once[key] = found, sizes
        else:
            self._known[key] = _with_sizes(*self._seen_once.pop(key), found, sizes)
        return outputs


def _direct(
    seen: list[_Seen], outputs: list[Tensor] | None, varying: Sequence[Tensor], constants: Iterable[Tensor]
) -> _Direct | None:
    """None where the call was more than one graph's, or something else was done with its inputs or outputs."""
    call, *others = seen
    wanted = outputs or []
    is_same = len(call.outputs) == len(wanted) and all(a is b for a, b in zip(call.outputs, wanted, strict=True))
    if others or not is_same:
        return None
    which = {id(tensor): i for i, tensor in enumerate(varying)}
    known = {id(tensor) for tensor in constants}
    inputs, places = list[Any](call.inputs), list[tuple[int, int]]()
    for i, value in enumerate(call.inputs):
        if id(value) in which:
            places.append((i, which[id(value)]))
            inputs[i] = None
        elif not isinstance(value, int) and id(value) not in known:
            return None
    return _Direct(call.graph, inputs, tuple(places))


def _with_sizes(
    first: _Direct, first_sizes: tuple[int, ...], second: _Direct, sizes: tuple[int, ...]
) -> _Direct | None:
    """The numbers among the inputs that went with the sizes; None where others changed, or another graph was taken."""
    if first.graph is not second.graph or first.places != second.places:
        return None
    changes = list(zip(first_sizes, sizes, strict=True))
    places: list[tuple[int, int]] = []
    for i, (a, b) in enumerate(zip(first.inputs, second.inputs, strict=True)):
        if isinstance(a, Tensor) or a is None:
            if a is not b:
                return None
        elif a != b:
            if (a, b) not in changes:
                return None
            places.append((i, changes.index((a, b))))
    return _Direct(second.graph, second.inputs, second.places, tuple(places))


_LOCK = threading.Lock()


@contextmanager
def _watched() -> Generator[list[_Seen]]:
    """Notes this thread's calls of inductor's graphs; nothing in a torch that calls them in another way."""
    seen: list[_Seen] = []
    try:
        from torch._inductor.output_code import CompiledFxGraph
    except ImportError:
        yield seen
        return
    thread = threading.get_ident()
    with _LOCK:
        original: Any = CompiledFxGraph.__call__

        def watching(self: Any, inputs: Sequence[Any]) -> Any:
            before = list(inputs)  # a graph empties its list
            outputs = original(self, inputs)
            graph = getattr(self, "current_callable", None)
            if threading.get_ident() == thread and graph is not None:
                seen.append(_Seen(graph, before, outputs))
            return outputs

        CompiledFxGraph.__call__ = watching
        try:
            yield seen
        finally:
            CompiledFxGraph.__call__ = original

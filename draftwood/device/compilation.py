"""Functions compiled by inductor, with the options that every graph here has."""

from __future__ import annotations

import itertools
import logging
import types
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

from draftwood.device.layers import allow_packed_products

P = ParamSpec("P")
R = TypeVar("R")


def compiled(
    function: Callable[P, R],
    *,
    enabled: bool,
    dynamic: bool | None = None,
    threaded_loops: bool = False,
    cpp_wrapper: bool = True,
) -> Callable[P, R]:
    """One inductor graph per shape, by default called from C++ without the interpreter's lock; guards on modules are
    off, they cost 0.4 ms per call. Fused loops stay on one thread unless they are long: a fork and join of OpenMP
    workers costs more than a short loop does."""
    if not enabled:
        return function
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        allow_packed_products()
        logging.getLogger("torch._inductor.ir").setLevel(logging.ERROR)  # its warnings are about what torch lacks
        skip = torch.compiler.skip_guard_on_all_nn_modules_unsafe
        options: dict[str, Any] = {"guard_filter_fn": skip, "cpp_wrapper": cpp_wrapper}
        if not threaded_loops:
            options["cpp.min_chunk_size"] = 1 << 30
        return torch.compile(_of_its_own(function), fullgraph=True, dynamic=dynamic, options=options)


_copies = itertools.count()


def _of_its_own(function: Callable[P, R]) -> Callable[P, R]:
    """A copy with its own code object: compiled graphs are kept by code object, and with guards on modules off two
    models in one process must not share them."""
    if not isinstance(function, types.FunctionType):
        return function
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_copies)}")
    copy = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return cast("Callable[P, R]", copy)


def mark_varying(tensor: torch.Tensor, *sizes: int) -> None:
    """Tells the compiler which sizes vary from call to call: those above 1, which it would have as symbols anyway if it
    knew."""
    mark: Any = torch._dynamo.maybe_mark_dynamic  # pyright: ignore[reportPrivateUsage]
    for size in sizes:
        if tensor.shape[size] > 1:
            mark(tensor, size)

"""What the machine offers and how a service uses it: device, number format, threads, compilation."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import resource
import types
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

from draftwood.config import ModelConfig
from draftwood.device.layers import allow_packed_products
from draftwood.errors import ConfigError

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(config: ModelConfig) -> torch.device:
    """The configured device; auto is a GPU where torch has one and Triton to compile kernels for it."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but torch finds no GPU here; use cpu", field="device")
    if config.device == "auto" and not has_triton():
        log.warning("Triton is not installed, so that the GPU is not used; --device cuda uses it all the same, slowly")
        return torch.device("cpu")
    return torch.device("cuda")


def has_triton() -> bool:
    """Whether kernels can be compiled for a GPU."""
    return importlib.util.find_spec("triton") is not None


def multiplies_bfloat16() -> bool:
    """Whether this processor has bfloat16 products of its own (AVX512-BF16 or AMX)."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and (
        bool(torch.cpu._is_avx512_bf16_supported())  # pyright: ignore[reportPrivateUsage]
        or bool(torch.cpu._is_amx_tile_supported())  # pyright: ignore[reportPrivateUsage]
    )


def pick_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """The configured number format; auto is bfloat16 where the device multiplies it natively, else float32,
    or float16 on a GPU."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16
        log.warning("this GPU does not multiply bfloat16; weights and activations are float16")
        return torch.float16
    return torch.bfloat16 if multiplies_bfloat16() else torch.float32


def use_threads(count: int) -> None:
    """Sets this process's CPU threads; 0 takes every core it may run on."""
    torch.set_num_threads(count or len(os.sched_getaffinity(0)))


def compiled(
    function: Callable[P, R],
    *,
    enabled: bool,
    dynamic: bool | None = None,
    threaded_loops: bool = False,
    cpp_wrapper: bool = True,
) -> Callable[P, R]:
    """One inductor graph per shape, by default called from C++ without the interpreter's lock; guards on modules are
    off, they cost 0.4 ms a call. Fused loops stay on one thread unless they are long: a fork and join of OpenMP workers
    costs more than a short loop does."""
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


def peak_memory_bytes() -> int:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

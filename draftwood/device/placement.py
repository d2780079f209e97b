"""Where a model runs on this machine: its device, its number format, its CPU threads."""

from __future__ import annotations

import importlib.util
import logging
import os

import torch

from draftwood.config import ModelConfig
from draftwood.errors import ConfigError

log = logging.getLogger(__name__)

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

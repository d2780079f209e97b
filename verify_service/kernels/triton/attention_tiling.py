"""How the work of tree attention is cut on a GPU, by shape."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

MOST_SLICES = 64
WAVE = 0.02  # what starting and ending a wave costs, in units of all keys' work
ROOMY = 200 << 10  # bytes of shared memory: Hopper and the large Blackwell have it


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the work is cut, and what of the GPU it uses."""

    rows: int  # per tile
    keys: int  # per tile
    warps: int
    stages: int  # of the pipeline that fetches keys and values
    slices: int  # of the keys, at most
    least_keys: int = 128  # per slice
    descriptors: bool = True  # the copy engine fetches tiles where pages hold whole ones
    prefetch: bool = True  # into L2, two tiles ahead
    overlap: bool = True  # launches, so that one waits for the one before it within the kernel


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a tiling depends on: multiprocessors, and the shared memory that a program may have, in bytes."""

    multiprocessors: int
    shared_memory: int


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """Properties of a device; of a small one for a CPU, where the interpreter runs."""
    if device.type != "cuda":
        return Gpu(4, 0)
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.multi_processor_count, properties.shared_memory_per_block_optin)


def choose_tiling(b: int, n: int, hq: int, hkv: int, d: int, dtype: torch.dtype, gpu: Gpu) -> Tiling:
    """A static table by shape: nothing is measured at run time, so that what is captured is what was tested."""
    rows, is_wide, is_roomy = n * hq // hkv, d > 128, gpu.shared_memory >= ROOMY
    if dtype == torch.float32:
        tile = Tiling(rows=16, keys=16 if is_wide else 32, warps=4, stages=2, slices=1)
    elif rows <= 16:  # bound by memory, which a deeper pipeline keeps busy
        stages = 3 if is_roomy else 2
        tile = Tiling(16, 64 if is_roomy else 32, warps=4, stages=stages, slices=1, least_keys=64, prefetch=False)
    elif rows <= 192 or not is_roomy:
        narrow = is_wide and not is_roomy
        stages = 3 if is_roomy and not is_wide else 2
        tile = Tiling(rows=64, keys=32 if narrow else 64, warps=8 if narrow else 4, stages=stages, slices=1)
    else:  # these fill the multiprocessors, so that the merge has no place to begin early
        tile = Tiling(rows=128, keys=64, warps=8, stages=2 if is_wide else 3, slices=1, overlap=False)
    return _sliced(tile, triton.cdiv(rows, tile.rows) * hkv * b, gpu.multiprocessors)


def _sliced(tile: Tiling, programs: int, multiprocessors: int) -> Tiling:
    """With as many slices as make the waves of programs short and full; short prefixes have fewer."""
    waves = {slices: triton.cdiv(programs * slices, multiprocessors) for slices in range(1, MOST_SLICES + 1)}
    slices = min(waves, key=lambda s: waves[s] / s + WAVE * waves[s])
    # One more wave costs more than a slice of few keys saves.
    least = tile.least_keys if waves[slices] == 1 else max(tile.least_keys, 16 * programs)
    return replace(tile, slices=slices, least_keys=least)


def descriptor_of(tensor: Tensor, tile: list[int]) -> TensorDescriptor:
    """Lets the copy engine fetch tiles of a tensor; what is outside the tensor comes as zeros."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), tile)


def can_have_descriptor(rows: Tensor) -> bool:
    """Whether the copy engine can fetch rows [B, N, H, D]: heads side by side, everything in multiples of 16 bytes."""
    size = rows.element_size()
    aligned = rows.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in rows.stride()[:2])
    return aligned and rows.stride(2) == rows.shape[3]

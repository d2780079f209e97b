"""What launches share: limits on shapes, the overlap of a kernel's start with the end of the one before, and fetching
what the one behind will read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from draftwood.errors import UnsupportedModelError

CHUNK = 8 << 10  # bytes that are called into the cache at once
BYTES_A_CHUNK = tl.constexpr(CHUNK)
FETCHERS = 64  # programs that do so


def require(holds: bool, field: str, limit: str) -> None:
    """Raises UnsupportedModelError for a shape that a kernel does not take."""
    if not holds:
        raise UnsupportedModelError(f"{field} {limit} on a GPU", field=field)


def overlaps(device: torch.device) -> bool:
    """Whether a kernel may start before the one ahead of it has ended: from compute capability 9.0 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def pipeline_stages(rows: Tensor) -> int:
    """Stages of a loop over blocks of nodes. Three take 216 KiB of shared memory for 16-bit rows, which only GPUs of
    data centres have; one takes 48, whatever the rows."""
    is_cuda = rows.device.type == "cuda"
    is_large = is_cuda and torch.cuda.get_device_capability(rows.device)[0] in (9, 10)
    return 3 if is_large and rows.dtype.itemsize == 2 else 1


@triton.jit
def wait_for_inputs(OVERLAPS: tl.constexpr):
    """Returns when the kernels ahead have ended; lets the next one start.

    In this order, so that a kernel that has not waited yet may read whatever the last but one wrote.
    """
    if OVERLAPS:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


def chunks_ahead(weight: Tensor | None, most: int) -> int:
    """How many chunks of a weight to call into the cache; none where the GPU has no engine for that."""
    if weight is None or not overlaps(weight.device) or not weight.is_contiguous():
        return 0
    return min(most, weight.nbytes // CHUNK)


def spread(chunks: int, lanes: int) -> int:
    """Programs among which chunks are divided: many, so that each asks for few, at most one a lane."""
    return max(min(chunks, FETCHERS), triton.cdiv(chunks, lanes))


@triton.jit
def fetch_ahead(weight, program, chunks, share, LANES: tl.constexpr):
    """Asks for a program's share of the first `chunks` of a weight to come into the L2 cache, and waits for nothing.

    Products read more than they compute, and memory idles between them: what is called early is not waited for later.
    """
    lane = tl.arange(0, LANES)
    chunk = program * share + lane
    last = tl.minimum(program * share + share, chunks)
    BYTES: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    at = weight + chunk.to(tl.int64) * (BYTES_A_CHUNK // BYTES)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.s32 p, $2, $3; @p cp.async.bulk.prefetch.L2.global [$1], $4; mov.u32 $0, 0; }",
        "=r,l,r,r,r", [at, chunk, last, BYTES_A_CHUNK], tl.int32, False, 1,
    )  # fmt: skip

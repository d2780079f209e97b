"""Between the matrix products of a decoder layer: the residual sum with the norm that follows it, and SwiGLU.

x <- x + delta,  y = rmsnorm(x) weight        y = silu(gate) up
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from verify_service.kernels.triton.launch import overlaps, require, wait_for_inputs

MAX_HIDDEN = 1 << 15
SWIGLU_BLOCK, SWIGLU_WARPS = 1024, 4


@triton.jit
def add_norm_kernel(
    x, delta, weight, total, normed, eps, x_row, delta_row, H: tl.constexpr, HP: tl.constexpr, OVERLAPS: tl.constexpr
):  # fmt: skip
    """Grid (M,): a row."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HP)
    inside = h < H
    # Matrix products stand between the kernel that wrote x and this one.
    factor = tl.load(weight + h, mask=inside, other=0.0)
    stream = tl.load(x + row * x_row + h, mask=inside, other=0.0)
    wait_for_inputs(OVERLAPS)
    added = tl.load(delta + row * delta_row + h, mask=inside, other=0.0)
    whole = (stream.to(tl.float32) + added.to(tl.float32)).to(stream.dtype)
    tl.store(total + row * H + h, whole, mask=inside)
    wide = whole.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / H + eps)
    tl.store(normed + row * H + h, (wide * scale * factor).to(stream.dtype), mask=inside)


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, total: Tensor, normed: Tensor) -> None:
    m, h = x.shape
    require(h <= MAX_HIDDEN, "hidden_size", f"hidden_size must be at most {MAX_HIDDEN}, not {h}, on a GPU")
    overlap, padded = overlaps(x.device), triton.next_power_of_2(h)
    add_norm_kernel[(m,)](
        x, delta, weight, total, normed, eps, x.stride(0), delta.stride(0), h, padded, overlap,
        num_warps=max(1, min(16, padded // 512)), launch_pdl=overlap,
    )  # fmt: skip


@triton.jit
def swiglu_kernel(x, out, x_row, F: tl.constexpr, BF: tl.constexpr, OVERLAPS: tl.constexpr):
    """Grid (ceil(F / BF), M): BF values of a row."""
    row = tl.program_id(1).to(tl.int64)
    f = tl.program_id(0) * BF + tl.arange(0, BF)
    inside = f < F
    wait_for_inputs(OVERLAPS)
    gate = tl.load(x + row * x_row + f, mask=inside, other=0.0)
    up = tl.load(x + row * x_row + F + f, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    # Rounded where transformers rounds: after the activation, too.
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + row * F + f, (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=inside)


def swiglu(x: Tensor, out: Tensor) -> None:
    m, f = out.shape
    overlap = overlaps(x.device)
    swiglu_kernel[(triton.cdiv(f, SWIGLU_BLOCK), m)](
        x, out, x.stride(0), f, SWIGLU_BLOCK, overlap, num_warps=SWIGLU_WARPS, launch_pdl=overlap
    )

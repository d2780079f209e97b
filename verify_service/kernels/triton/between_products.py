"""Between the matrix products of a decoder layer: residual sums with the norms that follow them, SwiGLU, and heads of
queries and keys, normed and rotated in one launch, where a compiler would make ten."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from verify_service.kernels.arguments import HeadNorms
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


@triton.jit
def rotate_heads_kernel(
    x, row_stride, cos, sin, q_weight, k_weight, q, keys, values, eps,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, STEP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (HQ + 2 HKV, M). Head h of q starts at h STEP of its row; those of k and v follow, D each."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, DP)
    inside = d < D
    # In the half-split form d rotates with the element half the rotary size away.
    other = tl.where(d < R // 2, d + R // 2, tl.where(d < R, d - R // 2, d))
    is_query, is_value = head < HQ, head >= HQ + HKV
    weight = tl.where(
        is_query, tl.load(q_weight + d, mask=inside, other=0.0), tl.load(k_weight + d, mask=inside, other=0.0)
    )
    partner = tl.where(
        is_query, tl.load(q_weight + other, mask=inside, other=0.0), tl.load(k_weight + other, mask=inside, other=0.0)
    )
    wait_for_inputs(OVERLAPS)
    at = x + row * row_stride + tl.where(is_query, head * STEP, HQ * STEP + (head - HQ) * D)
    value = tl.load(at + d, mask=inside, other=0.0)
    if is_value:
        tl.store(values + (row * HKV + head - HQ - HKV) * D + d, value, mask=inside)
    else:
        a = value.to(tl.float32)
        b = tl.load(at + other, mask=inside, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(a * a, 0) / D + eps)
        # Rounded where transformers rounds: after the norm.
        a = (a * scale * weight).to(value.dtype).to(tl.float32)
        b = (b * scale * partner).to(value.dtype).to(tl.float32)
        c = tl.load(cos + row * R + d, mask=d < R, other=1.0).to(tl.float32)
        s = tl.load(sin + row * R + d, mask=d < R, other=0.0).to(tl.float32)
        turned = (a * c + tl.where(d < R // 2, -b, b) * s).to(value.dtype)
        if is_query:
            tl.store(q + (row * HQ + head) * D + d, turned, mask=inside)
        else:
            tl.store(keys + (row * HKV + head - HQ) * D + d, turned, mask=inside)


def rotate_heads(
    x: Tensor, rotation: tuple[Tensor, Tensor], norms: HeadNorms, step: int, q: Tensor, keys: Tensor, values: Tensor
) -> None:
    m, hq, d = q.shape
    hkv, r = keys.shape[1], rotation[0].shape[1]
    fits = r % 2 == 0 and r <= d
    require(fits, "rope_parameters", f"{r} rotated values of heads of {d}: must be even and fit")
    overlap = overlaps(x.device)
    rotate_heads_kernel[(hq + 2 * hkv, m)](
        x, x.stride(0), *rotation, norms.q_weight, norms.k_weight, q, keys, values, norms.eps, hq, hkv, d,
        triton.next_power_of_2(d), r, step, overlap, num_warps=1, launch_pdl=overlap,
    )  # fmt: skip

"""Between the projection of an attention layer and its attention: norms of q and k, rotation, rows for the commit.

    q, k <- rotate(rmsnorm(x) weight)        v <- v

One launch instead of the ten that a compiler makes of it. A program has one head of one node.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from verify_service.kernels.arguments import HeadNorms
from verify_service.kernels.triton.launch import overlaps, require, wait_for_inputs


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

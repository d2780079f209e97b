"""Between the products of a decoder layer: the residual sum with the norm that follows it, and SwiGLU.

    x <- x + delta,  y = rmsnorm(x) weight        y = silu(gate) up

Each is one short launch that starts while the product before it ends, and has programs that call the next product's
weights into the cache meanwhile. Their plain twins are in verify_service/kernels/add_norm.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from verify_service.triton_kernels.launching import (
    chunks_ahead,
    fetch_ahead,
    overlaps,
    require,
    spread,
    wait_for_inputs,
)

MAX_HIDDEN = 1 << 15
CHUNKS_AHEAD = 1536  # of the next product's weight
PRODUCT_BLOCK, PRODUCT_WARPS = 1024, 4


@triton.jit
def add_norm_kernel(
    x, delta, weight, total, normed, next_weight, eps, x_row, delta_row, rows, chunks, share,
    H: tl.constexpr, HP: tl.constexpr, LANES: tl.constexpr, OVERLAPS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Grid (rows + programs that fetch ahead,): one row."""
    program = tl.program_id(0)
    if AHEAD:  # noqa: SIM102 — the compiler decides this one
        if program >= rows:
            fetch_ahead(next_weight, program - rows, chunks, share, LANES)
            return
    row = program.to(tl.int64)
    h = tl.arange(0, HP)
    inside = h < H
    # Products stand between the kernel that wrote x and this one.
    factor = tl.load(weight + h, mask=inside, other=0.0)
    stream = tl.load(x + row * x_row + h, mask=inside, other=0.0)
    wait_for_inputs(OVERLAPS)
    added = tl.load(delta + row * delta_row + h, mask=inside, other=0.0)
    whole = (stream.to(tl.float32) + added.to(tl.float32)).to(stream.dtype)
    tl.store(total + row * H + h, whole, mask=inside)
    wide = whole.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / H + eps)
    tl.store(normed + row * H + h, (wide * scale * factor).to(stream.dtype), mask=inside)


def add_norm(
    x: Tensor,  # [M, H]; rows may be strided, those of delta too
    delta: Tensor,  # [M, H]
    weight: Tensor,  # [H] float32, the whole factor
    eps: float,
    total: Tensor,  # [M, H] written: x + delta
    normed: Tensor,  # [M, H] written: its rmsnorm times the weight
    ahead: Tensor | None = None,  # the next product's weight
) -> None:
    """Raises UnsupportedModelError where rows are longer than 32768."""
    m, h = x.shape
    require(h <= MAX_HIDDEN, "hidden_size", f"must be at most {MAX_HIDDEN}, not {h},")
    overlap = overlaps(x.device)
    warps = max(1, min(16, triton.next_power_of_2(h) // 512))
    chunks = chunks_ahead(ahead, CHUNKS_AHEAD)
    programs = spread(chunks, 32 * warps)
    share = triton.cdiv(chunks, max(programs, 1))
    add_norm_kernel[(m + programs,)](
        x, delta, weight, total, normed, x if ahead is None else ahead, eps, x.stride(0), delta.stride(0), m, chunks,
        share, h, triton.next_power_of_2(h), 32 * warps, overlap, chunks > 0, num_warps=warps, launch_pdl=overlap,
    )  # fmt: skip


@triton.jit
def swiglu_kernel(
    x, out, next_weight, x_row, blocks, chunks, share,
    F: tl.constexpr, BF: tl.constexpr, LANES: tl.constexpr, OVERLAPS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(F / BF) + columns of programs that fetch ahead, M): BF values of a row."""
    block = tl.program_id(0)
    if AHEAD:  # noqa: SIM102 — likewise
        if block >= blocks:
            program = (block - blocks) * tl.num_programs(1) + tl.program_id(1)
            fetch_ahead(next_weight, program, chunks, share, LANES)
            return
    row = tl.program_id(1).to(tl.int64)
    f = block * BF + tl.arange(0, BF)
    inside = f < F
    wait_for_inputs(OVERLAPS)
    gate = tl.load(x + row * x_row + f, mask=inside, other=0.0)
    up = tl.load(x + row * x_row + F + f, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    # Rounded where transformers rounds: after the activation, too.
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + row * F + f, (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=inside)


def swiglu(
    x: Tensor,  # [M, 2 F] gate | up; rows may be strided
    out: Tensor,  # [M, F] written
    ahead: Tensor | None = None,  # the next product's weight
) -> None:
    """Takes any shape."""
    m, f = out.shape
    overlap = overlaps(x.device)
    blocks, lanes = triton.cdiv(f, PRODUCT_BLOCK), 32 * PRODUCT_WARPS
    chunks = chunks_ahead(ahead, CHUNKS_AHEAD)
    columns = triton.cdiv(spread(chunks, lanes), m)
    share = triton.cdiv(chunks, max(columns * m, 1))
    swiglu_kernel[(blocks + columns, m)](
        x, out, x if ahead is None else ahead, x.stride(0), blocks, chunks, share, f, PRODUCT_BLOCK, lanes, overlap,
        chunks > 0, num_warps=PRODUCT_WARPS, launch_pdl=overlap,
    )  # fmt: skip

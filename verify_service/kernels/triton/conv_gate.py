"""Causal convolution along tree paths, with what else is computed of a token before the recurrence: norms and gates.

    conv_i = silu(bias + sum over t of weight_t x_(t-th ancestor of i)), above the root the committed window

    Gated DeltaNet   g = decay softplus(a + dt_bias)        beta = sigmoid(b)
    Mamba2           dt = clamp(softplus(dt + dt_bias))     g = decay dt

Rounded where transformers rounds: conv once, beta and dt in the format of the activations. Serves Gated DeltaNet,
Mamba2 and plain short convolutions; one launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from verify_service.kernels.triton.launch import overlaps, require, wait_for_inputs

NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Gates:
    """A layer's gates: projections and parameters in, `g` and `beta` out. Mamba2 has no `write`; its beta is dt."""

    step: Tensor  # [B, N, HV] a of Gated DeltaNet, dt of Mamba2; rows may be strided
    write: Tensor | None  # [B, N, HV] b of Gated DeltaNet
    decay: Tensor  # [HV] float32, -exp(A_log)
    dt_bias: Tensor  # [HV]
    g: Tensor  # [B, N, HV] float32, written
    beta: Tensor  # [B, N, HV] float32, written
    limits: tuple[float, float] = (0.0, math.inf)  # of dt


@triton.jit
def _softplus(x):
    y = tl.exp(tl.minimum(x, 20.0))
    w = 1.0 + y
    # log(1 + y) without the error of the sum.
    small = tl.where(w == 1.0, y, tl.log(w) * (y / tl.where(w == 1.0, 1.0, w - 1.0)))
    return tl.where(x > 20.0, x, small)


@triton.jit
def _write_gates(
    step, step_batch, step_row, write, write_batch, write_row, decay, dt_bias, g, beta, low, high, b, nodes,
    N, HV: tl.constexpr, HVP: tl.constexpr, IS_DELTA: tl.constexpr,
):  # fmt: skip
    heads = tl.arange(0, HVP)
    is_head = heads < HV
    mask = (nodes < N)[:, None] & is_head[None, :]
    raw = tl.load(step + b * step_batch + nodes[:, None] * step_row + heads[None, :], mask=mask, other=0.0)
    bias = tl.load(dt_bias + heads, mask=is_head, other=0.0)
    scale = tl.load(decay + heads, mask=is_head, other=0.0)
    at = (b * N + nodes[:, None]) * HV + heads[None, :]
    if IS_DELTA:
        dt = _softplus(raw.to(tl.float32) + bias.to(tl.float32)[None, :])
        x = tl.load(write + b * write_batch + nodes[:, None] * write_row + heads[None, :], mask=mask, other=0.0)
        second = (1.0 / (1.0 + tl.exp(-x.to(tl.float32)))).to(raw.dtype).to(tl.float32)
    else:
        shifted = (raw.to(tl.float32) + bias.to(raw.dtype).to(tl.float32)[None, :]).to(raw.dtype)
        dt = _softplus(shifted.to(tl.float32)).to(raw.dtype).to(tl.float32)
        dt = tl.minimum(tl.maximum(dt, low), high).to(raw.dtype).to(tl.float32)
        second = dt
    tl.store(g + at, scale[None, :] * dt, mask=mask)
    tl.store(beta + at, second, mask=mask)


@triton.jit
def conv_gate_kernel(
    x, x_batch, x_row, parents, window, slots, weight, bias, inputs, conv, norms,
    step, step_batch, step_row, write, write_batch, write_row, decay, dt_bias, g, beta, low, high,
    N, C: tl.constexpr, KERNEL_SIZE: tl.constexpr, NORMED: tl.constexpr, HV: tl.constexpr, HVP: tl.constexpr,
    BC: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, IS_DELTA: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """grid (ceil(C / BC) + (HV > 0), ceil(N / BN), B): BC channels, a head where heads are normed, of BN nodes."""
    group, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    nodes = tl.program_id(1) * BN + tl.arange(0, BN)
    if group * BC >= C:
        wait_for_inputs(OVERLAPS)
        _write_gates(
            step, step_batch, step_row, write, write_batch, write_row, decay, dt_bias, g, beta, low, high, b, nodes,
            N, HV, HVP, IS_DELTA,
        )  # fmt: skip
    else:
        channels = group * BC + tl.arange(0, BC)
        is_channel = (channels < C)[None, :]
        mask = (nodes < N)[:, None] & is_channel
        slot = tl.load(slots + b).to(tl.int64)
        committed = window + slot * (KERNEL_SIZE - 1) * C + channels[None, :]
        # Where a walk from each node stands: a node, or -1, -2, … for the newest, second newest, … row of the window.
        # Neither parents nor the window were written by the kernels just ahead.
        current = tl.where(nodes < N, nodes, -1)
        walks = ()
        weights = (tl.load(weight + (KERNEL_SIZE - 1) * C + channels, mask=channels < C, other=0.0),)
        for tap in tl.static_range(1, KERNEL_SIZE):
            up = tl.load(parents + b * N + current, mask=current >= 0, other=0)
            current = tl.where(current >= 0, up, current - 1)
            above = (current < 0)[:, None] & is_channel
            far = tl.load(committed + (KERNEL_SIZE - 1 + current[:, None]) * C, mask=above, other=0.0)
            walks = walks + ((current, far),)  # noqa: RUF005 — Triton has no unpacking
            taken = tl.load(weight + (KERNEL_SIZE - 1 - tap) * C + channels, mask=channels < C, other=0.0)
            weights = weights + (taken,)  # noqa: RUF005
        wait_for_inputs(OVERLAPS)
        own = tl.load(x + b * x_batch + nodes[:, None] * x_row + channels[None, :], mask=mask, other=0.0)
        total = own.to(tl.float32) * weights[0][None, :]
        for tap in tl.static_range(1, KERNEL_SIZE):
            current = walks[tap - 1][0]
            inside = (current >= 0)[:, None] & is_channel
            near = tl.load(x + b * x_batch + current[:, None] * x_row + channels[None, :], mask=inside, other=0.0)
            total += tl.where(inside, near, walks[tap - 1][1]).to(tl.float32) * weights[tap][None, :]
        tl.store(inputs + (b * N + nodes[:, None]) * C + channels[None, :], own, mask=mask)
        if HAS_BIAS:
            total += tl.load(bias + channels, mask=channels < C, other=0.0)[None, :]
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        rounded = total.to(conv.dtype.element_ty)
        tl.store(conv + (b * N + nodes[:, None]) * C + channels[None, :], rounded, mask=mask)
        if group < NORMED:
            seen = rounded.to(tl.float32)
            length = tl.sqrt(tl.sum(seen * seen, 1) + 1e-6)
            tl.store(norms + (b * N + nodes) * NORMED + group, 1.0 / length, mask=nodes < N)


def conv_gate(
    x: Tensor,  # [B, N, C] the convolution's inputs; rows may be strided
    parents: Tensor,  # [B, N] int32, -1 for the root and spare nodes
    window: Tensor,  # [T, kernel_size - 1, C] committed inputs of one layer, newest last
    state_slots: Tensor,  # [B] int32
    weight: Tensor,  # [kernel_size, C] float32, the newest last
    bias: Tensor | None,  # [C] float32
    inputs: Tensor,  # [B, N, C] written: x
    conv: Tensor,  # [B, N, C] written
    *,
    norms: Tensor | None = None,  # [B, N, 2 HK] float32, written: 1 / |q| and 1 / |k| of the first 2 HK heads of conv
    key_dim: int = 0,  # K, of the normed heads
    gates: Gates | None = None,
    silu: bool = True,
) -> None:
    """Raises UnsupportedModelError where the kernel size is not 2 to 4 or a normed head no power of two, 16 to 256."""
    b, n, channels = x.shape
    kernel_size = weight.shape[0]
    require(2 <= kernel_size <= 4, "conv_kernel", f"must be 2 to 4, not {kernel_size},")
    block = 128
    if norms is not None:
        require(
            key_dim in (16, 32, 64, 128, 256), "linear_key_head_dim", f"must be 16, 32, 64, 128 or 256, not {key_dim},"
        )
        block = key_dim
    rows = min(8, triton.next_power_of_2(n))
    heads = 0 if gates is None else gates.g.shape[-1]
    unused = parents
    step, write, decay, dt_bias, g, beta = (unused,) * 6 if gates is None else (
        gates.step, unused if gates.write is None else gates.write, gates.decay, gates.dt_bias, gates.g, gates.beta,
    )  # fmt: skip
    low, high = (0.0, math.inf) if gates is None else gates.limits
    grid = (triton.cdiv(channels, block) + (heads > 0), triton.cdiv(n, rows), b)
    overlap = overlaps(x.device)
    conv_gate_kernel[grid](
        x, x.stride(0), x.stride(1), parents, window, state_slots, weight, unused if bias is None else bias,
        inputs, conv, unused if norms is None else norms,
        step, step.stride(0), step.stride(1), write, write.stride(0), write.stride(1), decay, dt_bias, g, beta,
        low, high, n, channels, kernel_size, 0 if norms is None else norms.shape[-1], heads,
        triton.next_power_of_2(max(heads, 1)), block, rows, bias is not None, silu,
        gates is not None and gates.write is not None, overlap,
        num_warps=max(1, min(4, rows * block // 256)), launch_pdl=overlap,
    )  # fmt: skip


def conv_gate_plain(
    x: Tensor,
    parents: Tensor,
    window: Tensor,
    state_slots: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inputs: Tensor,
    conv: Tensor,
    *,
    norms: Tensor | None = None,
    key_dim: int = 0,
    gates: Gates | None = None,
    silu: bool = True,
) -> None:
    """What `conv_gate` computes, shapes and all."""
    channels, kernel_size = x.shape[-1], weight.shape[0]
    rows = torch.cat([window[state_slots.long()], x], 1)  # [B, kernel_size - 1 + N, C]
    current = torch.arange(x.shape[1], device=x.device).expand_as(parents)
    total = torch.zeros_like(x, dtype=torch.float32)
    for tap in range(kernel_size):
        index = (current + kernel_size - 1)[..., None].expand(-1, -1, channels)
        total += rows.gather(1, index).float() * weight[kernel_size - 1 - tap]
        current = torch.where(current >= 0, parents.long().gather(1, current.clamp(min=0)), current - 1)
    if bias is not None:
        total += bias
    inputs.copy_(x)
    conv.copy_(F.silu(total) if silu else total)
    if norms is not None:
        heads = conv[..., : norms.shape[-1] * key_dim].float().unflatten(-1, (-1, key_dim))
        norms.copy_((heads.square().sum(-1) + NORM_EPS).rsqrt())
    if gates is not None:
        _gates_plain(gates)


def _gates_plain(gates: Gates) -> None:
    step = gates.step
    if gates.write is not None:
        gates.g.copy_(gates.decay * F.softplus(step.float() + gates.dt_bias.float()))
        gates.beta.copy_(gates.write.sigmoid())
    else:
        dt = F.softplus(step + gates.dt_bias.to(step.dtype)).clamp(*gates.limits).float()
        gates.g.copy_(gates.decay * dt)
        gates.beta.copy_(dt)

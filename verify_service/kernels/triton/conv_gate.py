"""Causal convolution along tree paths, with what else is computed of a token before the recurrence: norms and gates.

    conv_i = silu(bias + sum over t of weight_t x_(t-th ancestor of i)), above the root the committed window

    Gated DeltaNet   g = decay softplus(a + dt_bias)        beta = sigmoid(b)
    Mamba2           dt = clamp(softplus(dt + dt_bias))     g = decay dt

One launch serves Gated DeltaNet, Mamba2 and plain short convolutions.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from verify_service.kernels.arguments import Convolution, Gates, LayerCommitInputs, TreeMetadata
from verify_service.kernels.triton.launch import overlaps, require_head_sizes, require_kernel_size, wait_for_inputs


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
    x: Tensor,
    tree: TreeMetadata,
    windows: Tensor,
    convolution: Convolution,
    gates: Gates | None,
    commit_inputs: LayerCommitInputs,
    *,
    key_dim: int = 0,
) -> None:
    b, n, channels = x.shape
    kernel_size, bias, norms = convolution.weight.shape[0], convolution.bias, commit_inputs.norms
    require_kernel_size(kernel_size)
    if norms is not None:
        require_head_sizes(linear_key_head_dim=key_dim)
    rows, block = min(8, triton.next_power_of_2(n)), 128 if norms is None else key_dim
    unused = tree.parents
    heads = 0 if gates is None else commit_inputs.g.shape[-1]
    gates = gates or Gates(unused, None, unused, unused)
    step, write = gates.step, unused if gates.write is None else gates.write
    overlap = overlaps(x.device)
    conv_gate_kernel[(triton.cdiv(channels, block) + (heads > 0), triton.cdiv(n, rows), b)](
        x, x.stride(0), x.stride(1), tree.parents, windows, tree.state_slots, convolution.weight,
        unused if bias is None else bias, commit_inputs.inputs, commit_inputs.conv, unused if norms is None else norms,
        step, step.stride(0), step.stride(1), write, write.stride(0), write.stride(1), gates.decay, gates.dt_bias,
        commit_inputs.g, commit_inputs.beta, *gates.limits, n, channels, kernel_size,
        0 if norms is None else norms.shape[-1], heads, triton.next_power_of_2(max(heads, 1)), block, rows,
        bias is not None, convolution.silu, gates.write is not None, overlap,
        num_warps=max(1, min(4, rows * block // 256)), launch_pdl=overlap,
    )  # fmt: skip

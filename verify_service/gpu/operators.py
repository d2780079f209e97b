"""Kernels as operators that compiled layers may call: opaque to the compiler, one output each, effects declared.

What all layers of a pass share (tree metadata, kernel set) is not an argument but the running pass's: compiled layers
then depend on the number of rows alone, M = B * N, and one graph serves every batch and tree.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from verify_service.kernels.arguments import (
    AttentionSettings,
    Convolution,
    GatedNorm,
    Gates,
    HeadNorms,
    KvPages,
    LayerCommitInputs,
    TreeMetadata,
)
from verify_service.kernels.kernel_set import KernelSet
from verify_service.kernels.reference.conv_gate import conv_index


@dataclass(frozen=True, slots=True)
class Pass:
    """What the layers of one pass share."""

    kernels: KernelSet
    tree: TreeMetadata
    page_size: int

    def rows(self, flat: Tensor) -> Tensor:
        """[M, ...] as [B, N, ...]; whatever strides the rows have."""
        b, n = self.tree.parents.shape
        return flat.view(b, n, *flat.shape[1:])


_running: list[Pass] = []


def _dense_like(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@contextmanager
def running(current: Pass) -> Generator[None]:
    """Makes the operators belong to this pass. For one thread at a time: the device loop's."""
    _running.append(current)
    try:
        yield
    finally:
        _running.pop()


@torch.library.custom_op("draftwood::tree_attention", mutates_args=())
def tree_attention(
    q: Tensor,  # [M, HQ, D], rotated
    k: Tensor,  # [M, HKV, D], rotated
    v: Tensor,  # [M, HKV, D]
    key_pool: Tensor,  # [HKV, S, D]
    value_pool: Tensor,  # [HKV, S, D]
    sinks: Tensor | None,  # [HQ]
    scaling: float,
    sliding_window: int,  # 0: none
    soft_cap: float,  # 0: none
) -> Tensor:  # [M, HQ, D]
    p = _running[-1]
    out = _dense_like(q)
    pages = KvPages(key_pool, value_pool, p.page_size)
    settings = AttentionSettings(scaling, sliding_window or None, soft_cap or None, sinks)
    p.kernels.tree_attention(p.rows(q), p.rows(k), p.rows(v), pages, p.tree, settings, p.rows(out))
    return out


tree_attention.register_fake(_dense_like)


@torch.library.custom_op("draftwood::add_norm", mutates_args=())
def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """[M, H] and [M, H] to two of [M, H]: their sum, and its norm by `weight` [H] float32."""
    total, normed = _dense_like(x), _dense_like(x)
    _running[-1].kernels.add_norm(x, delta, weight, eps, total, normed)
    return total, normed


@add_norm.register_fake
def _(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _dense_like(x), _dense_like(x)


@torch.library.custom_op("draftwood::swiglu", mutates_args=())
def swiglu(x: Tensor) -> Tensor:
    """[M, gate | up] to [M, F]."""
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    _running[-1].kernels.swiglu(x, out)
    return out


@swiglu.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2)


@torch.library.custom_op("draftwood::normed_attention", mutates_args=("keys", "values"))
def normed_attention(
    projected: Tensor,  # [M, q, its gate between the heads where there is one | k | v]
    cos: Tensor,  # [M, R]
    sin: Tensor,  # [M, R]
    q_weight: Tensor,  # [D] float32
    k_weight: Tensor,  # [D] float32
    eps: float,
    step: int,  # from head to head of q
    keys: Tensor,  # [M, HKV, D]
    values: Tensor,  # [M, HKV, D]
    key_pool: Tensor,  # [HKV, S, D]
    value_pool: Tensor,  # [HKV, S, D]
    scaling: float,
    sliding_window: int,  # 0: none
) -> Tensor:  # [M, HQ, D]
    p = _running[-1]
    hkv, d = keys.shape[1:]
    q = projected.new_empty(projected.shape[0], (projected.shape[1] - 2 * hkv * d) // step, d)
    p.kernels.rotate_heads(projected, (cos, sin), HeadNorms(q_weight, k_weight, eps), step, q, keys, values)
    out = torch.empty_like(q)
    pages, settings = KvPages(key_pool, value_pool, p.page_size), AttentionSettings(scaling, sliding_window or None)
    p.kernels.tree_attention(p.rows(q), p.rows(keys), p.rows(values), pages, p.tree, settings, p.rows(out))
    return out


@normed_attention.register_fake
def _(
    projected: Tensor, _c: Tensor, _s: Tensor, _q: Tensor, _k: Tensor, _eps: float, step: int, keys: Tensor, *_: object
) -> Tensor:
    hkv, d = keys.shape[1:]
    return projected.new_empty(projected.shape[0], (projected.shape[1] - 2 * hkv * d) // step, d)


@torch.library.custom_op("draftwood::gated_delta_net", mutates_args=("inputs", "conv", "norms", "g", "beta"))
def gated_delta_net(
    projected: Tensor,  # [M, q | k | v | z | b | a]
    norm_weight: Tensor,  # [V]
    eps: float,
    windows: Tensor,  # [T, kernel_size - 1, C]
    states: Tensor,  # [T, HV, V, K] float32
    weight: Tensor,  # [kernel_size, C] float32
    decay: Tensor,  # [HV] float32
    dt_bias: Tensor,  # [HV] float32
    inputs: Tensor,  # [M, C]
    conv: Tensor,  # [M, C]
    norms: Tensor,  # [M, 2 HK] float32
    g: Tensor,  # [M, HV] float32
    beta: Tensor,  # [M, HV] float32
) -> Tensor:  # [M, HV, V], through the gated norm
    p = _running[-1]
    rows = p.rows(projected)  # [B, N, q | k | v | z | b | a]
    commit_inputs = LayerCommitInputs(*(p.rows(t) for t in (inputs, conv, norms, g, beta)))
    channels, (heads, value_dim, key_dim) = conv.shape[-1], states.shape[1:]
    x, z, write, step = rows.split([channels, heads * value_dim, heads, heads], -1)
    gates = Gates(step, write, decay, dt_bias)
    p.kernels.conv_gate(x, p.tree, windows, Convolution(weight), gates, commit_inputs, key_dim=key_dim)
    out = conv.new_empty(conv.shape[0], heads, value_dim)
    p.kernels.gdn_verify(commit_inputs, p.tree, states, GatedNorm(z, norm_weight, eps), p.rows(out))
    return out


@gated_delta_net.register_fake
def _(projected: Tensor, _weight: Tensor, _eps: float, _windows: Tensor, states: Tensor, *_: Tensor) -> Tensor:
    return projected.new_empty(projected.shape[0], *states.shape[1:3])


@torch.library.custom_op("draftwood::mamba2", mutates_args=("inputs", "conv", "g", "beta"))
def mamba2(
    xbc: Tensor,  # [M, x | B | C]
    dt: Tensor,  # [M, HV]
    windows: Tensor,  # [T, kernel_size - 1, C]
    states: Tensor,  # [T, HV, V, K] float32
    weight: Tensor,  # [kernel_size, C] float32
    bias: Tensor | None,  # [C] float32
    decay: Tensor,  # [HV] float32
    dt_bias: Tensor,  # [HV]
    skip: Tensor,  # [HV] float32
    least_step: float,
    most_step: float,
    inputs: Tensor,  # [M, C]
    conv: Tensor,  # [M, C]
    g: Tensor,  # [M, HV] float32
    beta: Tensor,  # [M, HV] float32
) -> Tensor:  # [M, HV, V]
    p = _running[-1]
    commit_inputs = LayerCommitInputs(p.rows(inputs), p.rows(conv), None, p.rows(g), p.rows(beta))
    gates = Gates(p.rows(dt), None, decay, dt_bias, (least_step, most_step))
    p.kernels.conv_gate(p.rows(xbc), p.tree, windows, Convolution(weight, bias), gates, commit_inputs)
    out = torch.empty(xbc.shape[0], *states.shape[1:3], device=xbc.device)
    p.kernels.mamba2_verify(commit_inputs, p.tree, states, skip, p.rows(out))
    return out


@mamba2.register_fake
def _(xbc: Tensor, _dt: Tensor, _windows: Tensor, states: Tensor, *_: object) -> Tensor:
    return torch.empty(xbc.shape[0], *states.shape[1:3], device=xbc.device)


@torch.library.custom_op("draftwood::conv_rows", mutates_args=())
def conv_rows(inputs: Tensor, windows: Tensor, kernel_size: int) -> Tensor:
    """What a short convolution reads, oldest first: [M, C] to [M, kernel_size, C]."""
    p = _running[-1]
    rows = torch.cat([windows.index_select(0, p.tree.state_slots), p.rows(inputs)], 1)
    picked = conv_index(p.tree.parents, kernel_size).flatten(1)[..., None].expand(-1, -1, rows.shape[-1])
    return rows.gather(1, picked).view(inputs.shape[0], kernel_size, -1)


@conv_rows.register_fake
def _(inputs: Tensor, _windows: Tensor, kernel_size: int) -> Tensor:
    return inputs.new_empty(inputs.shape[0], kernel_size, inputs.shape[1])

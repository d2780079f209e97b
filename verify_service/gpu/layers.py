"""Mixers of transformers' decoder layers over rows M = B * N, with their kernels behind operators: the way of a GPU.

Projections that read the same input become one product. What a layer gets of the committed state and leaves for the
commit comes through its keyword arguments, so that layers of one kind share a compiled graph. The compiler sees rows
alone, never trees or masks: one graph serves every batch and tree, and can itself be captured (docs/decisions/0014).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from draftwood.device.layers import PackedLinear, RMSNorm, packed
from verify_service.cache.layer_views import AttentionView, RecurrentView
from verify_service.core.target_spec import ATTENTION, GDN, MAMBA2, SHORT_CONV
from verify_service.gpu import operators
from verify_service.model.attention import register_attention
from verify_service.model.mixers.gated_delta_net import GatedDeltaNet
from verify_service.model.mixers.mamba2 import Mamba2
from verify_service.model.mixers.short_convolution import ShortConvolution
from verify_service.model.replace_layers import ATTENTION_NAMES, replace_parts, replaced_norm

ATTENTION_NAME = "draftwood_rows"


def attend(
    query: Tensor, key: Tensor, value: Tensor, view: AttentionView, step: None, *, scaling: float, **settings: Any
) -> Tensor:
    """As model.attention.TreeAttention says, of B = 1 and N = M rows; what the pass has is the operators' own."""
    del step
    q, k, v = (t.transpose(1, 2)[0] for t in (query, key, value))
    view.keys.copy_(k)
    view.values.copy_(v)
    window, soft_cap = settings["sliding_window"] or 0, settings["soft_cap"] or 0.0
    pools = (view.key_pool, view.value_pool)
    return operators.tree_attention(q, k, v, *pools, settings["sinks"], scaling, window, soft_cap)[None]


register_attention(ATTENTION_NAME, attend)


class _Share:
    """The product of projections that read the same input, between the call of the first and that of the last."""

    def __init__(self) -> None:
        self.rest: tuple[Tensor, ...] = ()


class FusedProjection(nn.Module):
    """The first of several projections, called in order: computes all of them."""

    def __init__(self, share: _Share, *layers: nn.Linear) -> None:
        super().__init__()
        biases = tuple(b for layer in layers if (b := cast("Tensor | None", layer.bias)) is not None)
        self.sizes = [layer.out_features for layer in layers]
        self.product = PackedLinear(
            *(layer.weight for layer in layers), biases=biases if len(biases) == len(layers) else ()
        )
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = self.product(x).split(self.sizes, -1)
        self.share.rest = tuple(rest)
        return first


class FollowingProjection(nn.Module):
    """A later one: takes its part."""

    def __init__(self, share: _Share) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        del x
        part, *rest = self.share.rest
        self.share.rest = tuple(rest)
        return part


# Attention whose heads of q and k are normed, then rotated; the gated ones have a gate between the heads of q.
_NORMED = frozenset({"Qwen3Attention", "Qwen3MoeAttention"})
_GATED = frozenset({"Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention"})


class NormedAttention(nn.Module):
    """Takes the place of such a layer's attention: everything between its two products is two kernels."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.qkv, self.o_proj = packed(attention.q_proj, attention.k_proj, attention.v_proj), packed(attention.o_proj)
        q_norm, k_norm = replaced_norm(attention.q_norm), replaced_norm(attention.k_norm)
        assert isinstance(q_norm, RMSNorm)
        assert isinstance(k_norm, RMSNorm)
        self.q_norm, self.k_norm = q_norm, k_norm
        self.head_dim, self.scaling = attention.head_dim, attention.scaling
        self.is_gated = type(attention).__name__ in _GATED
        self.q_size = attention.q_proj.out_features
        self.sliding_window: int = getattr(attention, "sliding_window", None) or 0

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *, attention: AttentionView, **_: Any
    ) -> tuple[Tensor, None]:
        projected = self.qkv(hidden_states)[0]  # [M, q | k | v]
        cos, sin = position_embeddings
        out = operators.normed_attention(
            projected,
            cos[0],
            sin[0],
            self.q_norm.weight,
            self.k_norm.weight,
            self.q_norm.eps,
            self.head_dim * (2 if self.is_gated else 1),
            attention.keys,
            attention.values,
            attention.key_pool,
            attention.value_pool,
            self.scaling,
            self.sliding_window,
        )
        if self.is_gated:
            gate = projected[:, : self.q_size].unflatten(-1, (-1, 2, self.head_dim))[:, :, 1]
            out = out * torch.sigmoid(gate)
        return self.o_proj(out.flatten(-2)[None]), None


class GatedDeltaNetRows(GatedDeltaNet):
    """Takes the place of `layer.linear_attn`, over hidden states [1, M, H], here and below."""

    def forward(self, hidden_states: Tensor, *, recurrent: RecurrentView, **_: Any) -> Tensor:
        projected = self.in_proj(hidden_states)  # [1, M, q | k | v | z | b | a]
        out = operators.gated_delta_net(
            projected[0],
            self.norm_weight,
            self.eps,
            recurrent.windows,
            recurrent.states,
            self.conv_weight,
            self.decay,
            self.dt_bias,
            recurrent.inputs,
            recurrent.conv,
            recurrent.norms,
            recurrent.g,
            recurrent.beta,
        )
        return self.out_proj(out[None].flatten(-2))


class Mamba2Rows(Mamba2):
    """Takes the place of `layer.mamba` or `layer.mixer`."""

    def forward(self, hidden_states: Tensor, *, recurrent: RecurrentView, **_: Any) -> Tensor:
        gate, xbc, dt = self.projected(hidden_states)
        out = operators.mamba2(
            xbc[0],
            dt[0],
            recurrent.windows,
            recurrent.states,
            self.conv_weight,
            self.conv_bias,
            self.decay,
            self.dt_bias,
            self.skip[:, 0],
            *self.limits,
            recurrent.inputs,
            recurrent.conv,
            recurrent.g,
            recurrent.beta,
        )
        return self.output(out[None].flatten(-2), gate, hidden_states.dtype)


class ShortConvolutionRows(ShortConvolution):
    """Takes the place of `layer.conv`."""

    def forward(self, hidden_states: Tensor, *, recurrent: RecurrentView, **_: Any) -> Tensor:
        b, c, x = self.in_proj(hidden_states).chunk(3, -1)
        inputs = (b * x)[0]
        rows = operators.conv_rows(inputs, recurrent.windows, self.conv_weight.shape[0])
        recurrent.inputs.copy_(inputs)
        conv = (rows.float() * self.conv_weight).sum(1)
        if self.conv_bias is not None:
            conv = conv + self.conv_bias
        return self.out_proj(c * conv.to(inputs.dtype))


ADAPTERS = {GDN: GatedDeltaNetRows, MAMBA2: Mamba2Rows, SHORT_CONV: ShortConvolutionRows}


def prepare_layer(layer: Any, index: int, mixers: tuple[str, ...]) -> bool:
    """Swaps the layer's parts in place; returns whether it can be compiled as one graph."""
    if ATTENTION in mixers:
        name = next(name for name in ATTENTION_NAMES if hasattr(layer, name))
        attention = getattr(layer, name)
        if type(attention).__name__ in _NORMED | _GATED and attention.q_proj.bias is None:
            setattr(layer, name, NormedAttention(attention))
        else:
            _fuse_projections(attention)
    return replace_parts(layer, index, mixers, ADAPTERS)


def _fuse_projections(attention: Any) -> None:
    names = ("q_proj", "k_proj", "v_proj")
    parts = [getattr(attention, name, None) for name in names]
    if not all(isinstance(part, nn.Linear) for part in parts):
        return
    share = _Share()
    attention.q_proj = FusedProjection(share, *parts)  # pyright: ignore[reportArgumentType]
    attention.k_proj, attention.v_proj = FollowingProjection(share), FollowingProjection(share)

"""Transformers' decoder layers and their mixers over rows M = B * N, with kernels behind operators: the way of a GPU.

Projections that read the same input become one product. What a layer gets of the committed state and leaves for the
commit comes through its keyword arguments, so that layers of one kind share a compiled graph. The compiler sees rows
alone, never trees or masks: one graph serves every batch and tree, and can itself be captured (docs/decisions/0014).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwood.device.layers import GatedMLP, RMSNorm, packed
from verify_service.cache.layer_views import AttentionView, RecurrentView
from verify_service.core.target_spec import ATTENTION, GDN, MAMBA2, SHORT_CONV
from verify_service.gpu import operators
from verify_service.model.attention import register_attention
from verify_service.model.mixers.gated_delta_net import GatedDeltaNet
from verify_service.model.mixers.mamba2 import Mamba2
from verify_service.model.mixers.short_convolution import ShortConvolution
from verify_service.model.replace_layers import (
    ATTENTION_NAMES,
    PreNormLayer,
    is_pre_norm,
    replace_parts,
    replaced_norm,
)

ATTENTION_NAME = "draftwood_rows"


def attend(
    query: Tensor, key: Tensor, value: Tensor, view: AttentionView, step: None, *, scaling: float, **settings: Any
) -> Tensor:
    """As model.attention says, of B = 1 and N = M rows; what the pass has is the operators' own."""
    del step
    q, k, v = (t.transpose(1, 2)[0] for t in (query, key, value))
    view.keys.copy_(k)
    view.values.copy_(v)
    window, soft_cap = settings["sliding_window"] or 0, settings["soft_cap"] or 0.0
    pools = (view.key_pool, view.value_pool)
    return operators.tree_attention(q, k, v, *pools, settings["sinks"], scaling, window, soft_cap)[None]


register_attention(ATTENTION_NAME, attend)


class SharedProjection(nn.Module):
    """One of several projections that read the same input, called in order; the first of them, which is given all
    layers, computes the rest as well."""

    def __init__(self, parts: list[Tensor], layers: Sequence[nn.Linear] = ()) -> None:
        """`parts` are the outputs that wait for their calls: one list for all."""
        super().__init__()
        self.parts = parts
        self.sizes = [layer.out_features for layer in layers]
        self.product = packed(*layers) if layers else None

    def forward(self, x: Tensor) -> Tensor:
        if self.product is not None:
            self.parts[:] = self.product(x).split(self.sizes, -1)
        return self.parts.pop(0)


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
        norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        step = self.head_dim * (2 if self.is_gated else 1)  # from head to head of q
        rows = (attention.keys, attention.values, attention.key_pool, attention.value_pool)
        out = operators.normed_attention(
            projected, cos[0], sin[0], *norms, step, *rows, self.scaling, self.sliding_window
        )
        if self.is_gated:
            gate = projected[:, : self.q_size].unflatten(-1, (-1, 2, self.head_dim))[:, :, 1]
            out = out * torch.sigmoid(gate)
        return self.o_proj(out.flatten(-2)[None]), None


class GatedDeltaNetRows(GatedDeltaNet):
    """Takes the place of `layer.linear_attn`, over hidden states [1, M, H], here and below."""

    def forward(self, hidden_states: Tensor, *, recurrent: RecurrentView, **_: Any) -> Tensor:
        projected = self.in_proj(hidden_states)  # [1, M, q | k | v | z | b | a]
        state = (recurrent.windows, recurrent.states)
        weights = (self.conv_weight, self.decay, self.dt_bias)
        written = recurrent.written()
        out = operators.gated_delta_net(projected[0], self.norm_weight, self.eps, *state, *weights, *written)
        return self.out_proj(out[None].flatten(-2))


class Mamba2Rows(Mamba2):
    """Takes the place of `layer.mamba` or `layer.mixer`."""

    def forward(self, hidden_states: Tensor, *, recurrent: RecurrentView, **_: Any) -> Tensor:
        gate, xbc, dt = self.projected(hidden_states)
        state = (recurrent.windows, recurrent.states)
        weights = (self.conv_weight, self.conv_bias, self.decay, self.dt_bias, self.skip[:, 0])
        written = (recurrent.inputs, recurrent.conv, recurrent.g, recurrent.beta)
        out = operators.mamba2(xbc[0], dt[0], *state, *weights, *self.limits, *written)
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


class PreNormRows(PreNormLayer):
    """Takes the place of a layer of the usual form, with what is between its products in kernels of their own: a
    residual sum goes with the norm behind it, across layers and groups of them."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        part = self.feed_forward
        self.is_swiglu = isinstance(part, GatedMLP) and part.activation is F.silu

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, stream: Tensor, pending: Tensor, **arguments: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """From a residual stream and what is still to be added to it, [1, M, H] each: the whole stream before the
        layer, and again the two, after it."""
        norm: Any = self.mixer_norm
        before, normed = operators.add_norm(stream[0], pending[0], norm.weight, norm.eps)
        mixed = self.mix(normed[None], **arguments)
        norm = self.feed_forward_norm
        between, normed = operators.add_norm(before, mixed[0], norm.weight, norm.eps)
        part: Any = self.feed_forward
        out = part.down(operators.swiglu(part.gate_up(normed))[None]) if self.is_swiglu else part(normed[None])
        return before[None], between[None], out


def run_rows(
    layers: Sequence[PreNormRows],
    hidden: tuple[Tensor, Tensor],  # the residual stream and what is still to be added, [1, M, H] each
    rope: Any,
    step: None,
    arguments: Sequence[dict[str, Any]],  # of each layer
) -> list[Tensor]:  # [1, M, H] each
    """The whole residual stream before each layer; then the stream after the last, and what is to be added to it."""
    stream, pending = hidden
    before: list[Tensor] = []
    for layer, own in zip(layers, arguments, strict=True):
        whole, stream, pending = layer(stream, pending, position_embeddings=rope, attention_mask=None, step=step, **own)
        before.append(whole)
    return [*before, stream, pending]


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


def can_fuse(layer: Any) -> bool:
    """Whether a prepared layer has the usual form, and norms that the kernel knows."""
    if not is_pre_norm(layer):
        return False
    parts = PreNormLayer(layer)
    return isinstance(parts.mixer_norm, RMSNorm) and isinstance(parts.feed_forward_norm, RMSNorm)


def _fuse_projections(attention: Any) -> None:
    names = ("q_proj", "k_proj", "v_proj")
    parts = [getattr(attention, name, None) for name in names]
    if not all(isinstance(part, nn.Linear) for part in parts):
        return
    shared: list[Tensor] = []
    attention.q_proj = SharedProjection(shared, parts)  # pyright: ignore[reportArgumentType]
    attention.k_proj, attention.v_proj = SharedProjection(shared), SharedProjection(shared)

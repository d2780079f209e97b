"""Layers of the usual form with what is between their products in kernels of their own: a residual sum goes with the
norm behind it, across layers and groups of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from draftwood.device.layers import GatedMLP, RMSNorm
from verify_service.gpu import operators
from verify_service.model.pre_norm import PreNormLayer, is_pre_norm


def can_fuse(layer: Any) -> bool:
    """Whether a prepared layer has the form, and norms that the kernel knows."""
    if not is_pre_norm(layer):
        return False
    parts = PreNormLayer(layer)
    return isinstance(parts.mixer_norm, RMSNorm) and isinstance(parts.feed_forward_norm, RMSNorm)


class PreNormRows(PreNormLayer):
    """Takes the place of such a layer."""

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

"""Replaces a decoder layer's parts by the project's own: mixers for exactness, norms and linear layers for speed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from draftwood.layers import GatedMLP, RMSNorm, packed
from verify_service.target.gated_delta_net import TreeGatedDeltaNet

# RMSNorm classes by what they multiply with: the weight w, or 1 + w.
PLAIN_NORMS = frozenset({"LlamaRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "MistralRMSNorm"})
CENTRED_NORMS = frozenset({"Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm"})
GDN_MIXERS = frozenset({"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"})


def fused_norm(norm: nn.Module) -> nn.Module:
    """The same norm as one fused op; unknown classes stay as they are."""
    name = type(norm).__name__
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, torch.Tensor) or eps is None:
        return norm
    if name in PLAIN_NORMS:
        return RMSNorm(weight, eps)
    if name in CENTRED_NORMS:
        return RMSNorm(1.0 + weight.float(), eps)
    return norm


def fuse_layer(layer: Any) -> bool:
    """Swaps the layer's parts in place; returns whether all of it can be compiled as one graph."""
    for name, child in list(layer.named_children()):
        if "norm" in name:
            setattr(layer, name, fused_norm(child))
    mixer = getattr(layer, "linear_attn", None)
    if mixer is not None and type(mixer).__name__ in GDN_MIXERS:
        layer.linear_attn = TreeGatedDeltaNet(mixer)
    attention = getattr(layer, "self_attn", None)
    if attention is not None:
        for name in ("q_norm", "k_norm"):
            if getattr(attention, name, None) is not None:
                setattr(attention, name, fused_norm(getattr(attention, name)))
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(attention, name, packed(getattr(attention, name)))
    mlp = layer.mlp
    names = ("gate_proj", "up_proj", "down_proj")
    is_dense = all(isinstance(getattr(mlp, name, None), nn.Linear) for name in names)
    if is_dense and all(getattr(mlp, name).bias is None for name in names):
        layer.mlp = GatedMLP(*(getattr(mlp, name).weight for name in names))
    return is_dense

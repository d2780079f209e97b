"""Replaces a decoder layer's parts by the project's own: mixers for exactness, norms and linear layers for speed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from draftwood.layers import GatedMLP, RMSNorm, packed
from verify_service.target.gated_delta_net import TreeGatedDeltaNet

# RMSNorm classes by what they multiply with: the weight w, or 1 + w.
_PLAIN = (
    "Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Mistral", "Mixtral", "GptOss", "Phi3", "Olmo2", "Olmo3", "Granite",
    "SmolLM3", "Exaone4", "Glm4",
)  # fmt: skip
_CENTRED = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "Gemma", "Gemma2", "Gemma3")
PLAIN_NORMS = frozenset(f"{family}RMSNorm" for family in _PLAIN)
CENTRED_NORMS = frozenset(f"{family}RMSNorm" for family in _CENTRED)
_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}
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
        for name, child in list(attention.named_children()):
            if "norm" in name:
                setattr(attention, name, fused_norm(child))
        _pack_linears(attention)
    return _fuse_mlp(layer)


def _fuse_mlp(layer: Any) -> bool:
    """Returns whether the feed-forward part is dense: with experts, sizes depend on the tokens."""
    mlp = layer.mlp
    children = dict(mlp.named_children())
    if any(not isinstance(child, nn.Linear) and [*child.parameters()] for child in children.values()):
        return False
    if children.keys() == _GATED and not any(name.endswith("bias") for name, _ in mlp.named_parameters()):
        is_silu = type(mlp.act_fn).__name__ in ("SiLUActivation", "SiLU")
        activation = F.silu if is_silu else mlp.act_fn
        weights = (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
        layer.mlp = GatedMLP(*weights, activation=activation)
    else:
        _pack_linears(mlp)
    return True


def _pack_linears(parent: nn.Module) -> None:
    for name, child in list(parent.named_children()):
        if isinstance(child, nn.Linear):
            setattr(parent, name, packed(child))

"""Replaces a decoder layer's parts by the project's own: mixers for exactness, norms and linear layers for speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from draftwood.device.layers import GatedMLP, RMSNorm, packed
from draftwood.errors import UnsupportedModelError
from verify_service.core.target_spec import ATTENTION, GDN, MAMBA2, OTHER, SHORT_CONV
from verify_service.model.mixers import gated_delta_net, mamba2, short_convolution

# RMSNorm classes by what they multiply with: the weight w, or 1 + w.
_PLAIN = (
    "Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Mistral", "Mixtral", "GptOss", "Phi3", "Olmo2", "Olmo3", "Granite",
    "SmolLM3", "Exaone4", "Glm4", "GraniteMoeHybrid", "FalconH1", "Bamba", "Lfm2",
)  # fmt: skip
_CENTRED = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "Gemma", "Gemma2", "Gemma3")
PLAIN_NORMS = frozenset(f"{family}RMSNorm" for family in _PLAIN)
CENTRED_NORMS = frozenset(f"{family}RMSNorm" for family in _CENTRED)
_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}
# Classes of recurrent mixers in transformers.
_MIXERS = {GDN: gated_delta_net.MIXERS, MAMBA2: mamba2.MIXERS, SHORT_CONV: short_convolution.MIXERS}

# Layers of the usual form, mixer and feed-forward each behind a norm and added to the residual stream: names of their
# norms and feed-forward, and of mixers.
_USUAL = ("input_layernorm", "post_attention_layernorm", "mlp")
_FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral", "Qwen3_5", "Qwen3Next")
_NAMES: dict[str, tuple[str, str, str]] = {f"{family}DecoderLayer": _USUAL for family in _FAMILIES}
_NAMES["Lfm2DecoderLayer"] = ("operator_norm", "ffn_norm", "feed_forward")
_MIXER_NAMES = ("self_attn", "linear_attn", "conv")

Adapters = Mapping[str, Callable[[Any], nn.Module]]  # by kind of mixer: what takes its place, made from it

ATTENTION_NAMES = ("self_attn", "mixer")


def replaced_norm(norm: nn.Module) -> nn.Module:
    """The same norm as one fused op; unknown classes stay as they are."""
    name, weight = type(norm).__name__, getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if name not in PLAIN_NORMS | CENTRED_NORMS or not isinstance(weight, Tensor) or eps is None:
        return norm
    return RMSNorm(1.0 + weight.float() if name in CENTRED_NORMS else weight, eps)


def replace_parts(layer: Any, index: int, mixers: tuple[str, ...], adapters: Adapters) -> bool:
    """Swaps the layer's parts in place; returns whether all of it can be compiled as one graph. Raises
    UnsupportedModelError where a recurrent mixer has no adapter."""
    if OTHER in mixers:
        return False
    _replace_norms(layer)
    parts = {name: part for name, part in layer.named_children() if "norm" not in name}
    for kind in mixers:
        if kind == ATTENTION:
            attention = parts.pop(next(name for name in ATTENTION_NAMES if name in parts))
            _replace_norms(attention)
            _pack_linears(attention)
        else:
            _adapt(layer, index, kind, parts, adapters[kind])
    are_dense = [_fuse_feed_forward(layer, name, part) for name, part in parts.items()]
    return all(are_dense)


def _adapt(layer: Any, index: int, kind: str, parts: dict[str, nn.Module], adapter: Callable[[Any], nn.Module]) -> None:
    """Puts the adapter in the place of the layer's recurrent mixer, and takes that out of `parts`."""
    for name, part in parts.items():
        if type(part).__name__ in _MIXERS[kind]:
            setattr(layer, name, adapter(parts.pop(name)))
            return
    found = ", ".join(type(part).__name__ for part in parts.values())
    raise UnsupportedModelError(f"layer {index} has no mixer with a {kind} adapter: {found}", field=f"layers[{index}]")


def _replace_norms(parent: nn.Module) -> None:
    for name, child in list(parent.named_children()):
        if "norm" in name:
            setattr(parent, name, replaced_norm(child))


def _fuse_feed_forward(layer: Any, name: str, part: Any) -> bool:
    """Returns whether it is dense: with experts, sizes depend on the tokens."""
    children = dict(part.named_children())
    if any(not isinstance(child, nn.Linear) and [*child.parameters()] for child in children.values()):
        return False
    has_bias = any(key.endswith("bias") for key, _ in part.named_parameters())
    if name == "mlp" and children.keys() == _GATED and not has_bias:  # Falcon-H1's feed_forward has factors inside
        activation = F.silu if type(part.act_fn).__name__ in ("SiLUActivation", "SiLU") else part.act_fn
        weights = (part.gate_proj.weight, part.up_proj.weight, part.down_proj.weight)
        layer.mlp = GatedMLP(*weights, activation=activation)
    else:
        _pack_linears(part)
    return True


def _pack_linears(parent: nn.Module) -> None:
    for name, child in list(parent.named_children()):
        if isinstance(child, nn.Linear):
            setattr(parent, name, packed(child))


def is_pre_norm(layer: nn.Module) -> bool:
    """Whether transformers' layer has the usual form and nothing besides."""
    return type(layer).__name__ in _NAMES


def with_arguments(layer: nn.Module) -> nn.Module:
    """The layer in a form that passes on what a step has for its mixer: LFM2's own does not do so in every version of
    transformers."""
    return PreNormLayer(layer) if type(layer).__name__ == "Lfm2DecoderLayer" else layer


class PreNormLayer(nn.Module):
    """A layer of the usual form, of the parts that it has by now."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        first, second, feed_forward = _NAMES[type(layer).__name__]
        self.mixer: nn.Module = next(getattr(layer, name) for name in _MIXER_NAMES if hasattr(layer, name))
        self.mixer_norm: nn.Module = getattr(layer, first)
        self.feed_forward_norm: nn.Module = getattr(layer, second)
        self.feed_forward: nn.Module = getattr(layer, feed_forward)

    def mix(self, normed: Tensor, **arguments: Any) -> Tensor:
        """The mixer's output."""
        out = self.mixer(hidden_states=normed, **arguments)
        return out[0] if isinstance(out, tuple) else out

    def forward(self, hidden: Tensor, **arguments: Any) -> Tensor:  # [B, N, H]
        hidden = hidden + self.mix(self.mixer_norm(hidden), **arguments)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))

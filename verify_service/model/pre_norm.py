"""StepRunner layers of the usual form: mixer and feed-forward each behind a norm, each added to the residual stream."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

_USUAL = ("input_layernorm", "post_attention_layernorm", "mlp")
_FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral", "Qwen3_5", "Qwen3Next")
_NAMES: dict[str, tuple[str, str, str]] = {f"{family}DecoderLayer": _USUAL for family in _FAMILIES}
_NAMES["Lfm2DecoderLayer"] = ("operator_norm", "ffn_norm", "feed_forward")
_MIXERS = ("self_attn", "linear_attn", "conv")


def is_pre_norm(layer: nn.Module) -> bool:
    """Whether transformers' layer has this form and nothing besides."""
    return type(layer).__name__ in _NAMES


def with_arguments(layer: nn.Module) -> nn.Module:
    """The layer in a form that passes on what a step has for its mixer: LFM2's own does not do so in every version of
    transformers."""
    return PreNormLayer(layer) if type(layer).__name__ == "Lfm2DecoderLayer" else layer


class PreNormLayer(nn.Module):
    """Such a layer, of the parts that it has by now."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        first, second, feed_forward = _NAMES[type(layer).__name__]
        self.mixer: nn.Module = next(getattr(layer, name) for name in _MIXERS if hasattr(layer, name))
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

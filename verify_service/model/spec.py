"""A target's shapes and limits, read from its configuration; which models are served, and which of their layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from draftwood.errors import UnsupportedModelError
from verify_service.core.target_spec import ATTENTION, GDN, MAMBA2, OTHER, SHORT_CONV, RecurrentShape, TargetSpec

UNLIMITED_POSITIONS = 1 << 20
# Transformers' model types whose mixers have an adapter: with attention alone, and with recurrent mixers.
_ATTENTION_ALONE = (
    "llama", "qwen2", "qwen3", "mistral", "qwen3_moe", "mixtral", "gpt_oss", "gemma2", "gemma3_text", "gemma", "phi3",
    "olmo2", "olmo3", "granite", "smollm3", "cohere2", "exaone4", "glm4",
)  # fmt: skip
_RECURRENT = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), GDN),
    **dict.fromkeys(("nemotron_h", "granitemoehybrid", "falcon_h1", "bamba", "mamba2"), MAMBA2),
    "lfm2": SHORT_CONV,
}
SUPPORTED = frozenset((*_ATTENTION_ALONE, *_RECURRENT))


def text_config(config: Any) -> Any:
    """The text model's part of a configuration: itself, or what a multimodal one wraps."""
    return getattr(config, "text_config", None) or config


def read_spec(config: Any, stop_token_ids: tuple[int, ...], *, allow_unsafe: bool = False) -> TargetSpec:
    """Reads a transformers text configuration. Raises UnsupportedModelError naming what has no adapter."""
    model_type = config.model_type
    types = list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
    if model_type not in SUPPORTED and not allow_unsafe:
        mixer = _first_mixer(config)
        raise UnsupportedModelError(
            f"model_type {model_type!r} has no adapter{f' for {mixer}' if mixer else ''} "
            f"(supported: {', '.join(sorted(SUPPORTED))})",
            field="model_type",
        )
    known = _mixers_by_layer_type(model_type)
    for i, kind in enumerate(types):
        if kind not in known and not allow_unsafe:
            raise UnsupportedModelError(
                f"layer {i} of {model_type} is a {kind} layer, which has no tree adapter; a rejected draft would stay "
                f"in its state. --allow-hybrid-unsafe serves it all the same.",
                field=f"layer_types[{i}]",
            )
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModelError(
            f"use_bidirectional_attention is {config.use_bidirectional_attention!r}; only causal models are served",
            field="use_bidirectional_attention",
        )
    mixers = tuple(known.get(kind, (OTHER,)) for kind in types)
    num_heads = getattr(config, "num_attention_heads", None) or 1  # none at all in Mamba2
    kind = _RECURRENT.get(model_type)
    return TargetSpec(
        model_type=model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        mixers=mixers,
        layer_types=tuple(types),
        recurrent=_SHAPES[kind](config) if kind is not None and any(kind in names for names in mixers) else None,
        max_positions=getattr(config, "max_position_embeddings", None) or UNLIMITED_POSITIONS,
        stop_token_ids=stop_token_ids,
        embedding_factor=float(getattr(config, "embedding_multiplier", 1.0)),
        logit_factor=_logit_factor(config),
        logit_cap=getattr(config, "final_logit_softcapping", None),
    )


def _first_mixer(config: Any) -> str:
    """Path and class of the first token mixer that is not attention, else of the first; empty where there is none."""
    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config)
    except Exception:
        return ""
    lists = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    layers = [(name, part) for name, part in lists if len(part) == config.num_hidden_layers]
    if not layers:
        return ""
    prefix, stack = layers[0]
    mixers = [
        f"{prefix}.{i}.{name} ({type(part).__name__})"
        for i, layer in enumerate(stack)
        for name, part in layer.named_children()
        if not any(word in name for word in ("norm", "ln", "mlp", "feed_forward", "ff"))
        and any(True for _ in part.parameters())
    ]
    return next((mixer for mixer in mixers if "Attention" not in mixer), mixers[0] if mixers else "")


def _logit_factor(config: Any) -> float:
    """What logits are multiplied with, under whichever name the family has for it."""
    factor = getattr(config, "lm_head_multiplier", None) or getattr(config, "logit_scale", 1.0)
    return float(factor / getattr(config, "logits_scaling", 1.0))


def _mixers_by_layer_type(model_type: str) -> dict[str, tuple[str, ...]]:
    """What transformers' names of layer types mean in a model of this type."""
    types: dict[str, tuple[str, ...]] = {"full_attention": (ATTENTION,), "sliding_attention": (ATTENTION,)}
    if kind := _RECURRENT.get(model_type):
        types["conv" if kind == SHORT_CONV else "linear_attention"] = (kind,)
        if model_type == "falcon_h1":
            types["hybrid"] = (kind, ATTENTION)
    if model_type == "nemotron_h":
        types |= {"mlp": (), "moe": ()}
    return types


def _gdn_shape(config: Any) -> RecurrentShape:
    hk, hv = config.linear_num_key_heads, config.linear_num_value_heads
    dk, dv = config.linear_key_head_dim, config.linear_value_head_dim
    return RecurrentShape(GDN, hk, hv, dk, dv, 2 * hk * dk + hv * dv, config.linear_conv_kernel_dim)


def _mamba2_shape(config: Any) -> RecurrentShape:
    """The families name the same sizes differently."""

    def read(*names: str) -> int:
        return next(getattr(config, name) for name in names if hasattr(config, name))

    hk, hv = read("mamba_n_groups", "n_groups"), read("mamba_n_heads", "mamba_num_heads", "num_heads")
    dk = read("mamba_d_state", "ssm_state_size", "state_size")
    dv = read("mamba_d_head", "mamba_head_dim", "head_dim")
    return RecurrentShape(MAMBA2, hk, hv, dk, dv, 2 * hk * dk + hv * dv, read("mamba_d_conv", "conv_kernel"))


def _short_conv_shape(config: Any) -> RecurrentShape:
    return RecurrentShape(SHORT_CONV, 0, 0, 0, 0, config.hidden_size, config.conv_L_cache)


_SHAPES = {GDN: _gdn_shape, MAMBA2: _mamba2_shape, SHORT_CONV: _short_conv_shape}

"""What the engine needs to know of a target model, read from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftwood.errors import UnsupportedModelError

ATTENTION, GDN, OTHER = "attention", "gdn", "other"


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """Shape of one Gated DeltaNet layer's committed state."""

    num_key_heads: int  # HK
    num_value_heads: int  # HV
    key_dim: int  # K
    value_dim: int  # V
    channels: int  # C = 2 HK K + HV V
    taps: int  # convolution kernel size


NO_RECURRENCE = RecurrentShape(0, 0, 0, 0, 0, 1)


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """Shapes and limits. `mixers` names each decoder layer's token mixer, in order, `layer_types` its type in
    transformers' configuration."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_kv_heads: int  # HKV
    head_dim: int  # D
    mixers: tuple[str, ...]
    layer_types: tuple[str, ...]
    recurrent: RecurrentShape | None
    max_positions: int
    stop_token_ids: tuple[int, ...]
    embedding_factor: float = 1.0  # where the model multiplies embeddings outside of their module
    logit_factor: float = 1.0
    logit_cap: float | None = None  # logits become cap * tanh(logit / cap), after the factor

    @property
    def num_attention_layers(self) -> int:
        """A: layers with a KV cache."""
        return sum(mixer == ATTENTION for mixer in self.mixers)

    @property
    def num_recurrent_layers(self) -> int:
        """R: layers with a recurrent state."""
        return sum(mixer == GDN for mixer in self.mixers)

    @property
    def taps(self) -> int:
        """Convolution kernel size; 1 without recurrent layers."""
        return self.recurrent.taps if self.recurrent else 1


# Transformers' model types whose mixers have an adapter, and the class that holds the text model.
SUPPORTED = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "glm4": "Glm4ForCausalLM",
}
_LAYER_TYPES = {"full_attention": ATTENTION, "sliding_attention": ATTENTION, "linear_attention": GDN}


def text_config(config: Any) -> Any:
    """The text model's part of a configuration: itself, or what a multimodal one wraps."""
    return getattr(config, "text_config", None) or config


def read_spec(config: Any, stop_token_ids: tuple[int, ...], *, allow_unsafe: bool = False) -> TargetSpec:
    """Reads a transformers text configuration. Raises UnsupportedModelError naming what has no adapter."""
    model_type = config.model_type
    types = list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
    if model_type not in SUPPORTED and not allow_unsafe:
        raise UnsupportedModelError(
            f"model_type {model_type!r} has no adapter (supported: {', '.join(sorted(SUPPORTED))})", field="model_type"
        )
    for i, kind in enumerate(types):
        if kind not in _LAYER_TYPES and not allow_unsafe:
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
    mixers = tuple(_LAYER_TYPES.get(kind, OTHER) for kind in types)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return TargetSpec(
        model_type=model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        mixers=mixers,
        layer_types=tuple(types),
        recurrent=_recurrent_shape(config) if GDN in mixers else None,
        max_positions=config.max_position_embeddings,
        stop_token_ids=stop_token_ids,
        embedding_factor=float(getattr(config, "embedding_multiplier", 1.0)),
        logit_factor=getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0),
        logit_cap=getattr(config, "final_logit_softcapping", None),
    )


def _recurrent_shape(config: Any) -> RecurrentShape:
    hk, hv = config.linear_num_key_heads, config.linear_num_value_heads
    dk, dv = config.linear_key_head_dim, config.linear_value_head_dim
    return RecurrentShape(hk, hv, dk, dv, 2 * hk * dk + hv * dv, config.linear_conv_kernel_dim)

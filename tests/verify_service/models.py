"""Tiny random target models of every supported family, saved as checkpoints; docs/models.md has its table from here.

Their weights are wide (0.3): at transformers' default of 0.02 a polluted recurrent state moves no logit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
GDN: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
NEMOTRON: dict[str, Any] = {
    **BASE,
    "head_dim": 16,
    "layers_block_type": ["mamba", "attention", "moe", "mamba", "mlp"],
    "ssm_state_size": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "time_step_min": 1e-6,  # transformers limits time steps in prompts and not in answers: not within reach here
}
NEMOTRON.pop("num_hidden_layers")
GRANITE: dict[str, Any] = {
    **BASE,
    **MAMBA2,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "shared_intermediate_size": 128,
    "intermediate_size": 32,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.5,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.2,
}
FALCON: dict[str, Any] = {
    **BASE,
    **MAMBA2,
    "head_dim": 16,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_n_groups": 1,
    "lm_head_multiplier": 0.6,
    "embedding_multiplier": 2.0,
    "mlp_multipliers": [1.2, 0.8],
    "key_multiplier": 0.7,
    "attention_out_multiplier": 0.8,
    "attention_in_multiplier": 1.1,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.9,
}
SLIDING, FULL = "sliding_attention", "full_attention"

# Ways to decode in which ids and log-probabilities are held to transformers' own: no draft, a chain or a tree, and the
# number of nodes drafted.
BRIEF = ("none 0", "chain 15", "tree 63")
THOROUGH = ("none 0", "chain 15", "tree 1", "tree 15", "tree 31", "tree 63")


@dataclass(frozen=True, slots=True)
class Family:
    """A model type, a tiny configuration that shows what is special about it, and how it is tested."""

    special: str  # for readers of docs/models.md
    config: dict[str, Any]
    modes: tuple[str, ...] = BRIEF


FAMILIES: dict[str, Family] = {
    "llama": Family("rotation of Llama 3", {**BASE, "rope_parameters": LLAMA3_ROPE}),
    "qwen2": Family("biases of q, k and v", BASE),
    "qwen3": Family("norms of q and k", {**BASE, "head_dim": 16}, THOROUGH),
    "mistral": Family("one sliding window in all layers", {**BASE, "sliding_window": 16, "head_dim": 16}, THOROUGH),
    "qwen3_next": Family(
        "gated attention, experts with a shared one",
        {**BASE, "head_dim": 16, **GDN, **MOE, "decoder_sparse_step": 1},
        THOROUGH,
    ),
    "qwen3_5_text": Family("gated attention, partial rotation", {**BASE, "head_dim": 16, **GDN}, THOROUGH),
    "qwen3_5_moe_text": Family("gated attention, experts with a shared one", {**BASE, "head_dim": 16, **GDN, **MOE}),
    "qwen3_moe": Family(
        "experts, dense layers between them",
        {**BASE, "head_dim": 16, **MOE, "mlp_only_layers": [1]},
    ),
    "mixtral": Family(
        "experts, one sliding window in all layers",
        {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    ),
    "gpt_oss": Family(
        "sinks, every other layer with a sliding window, YaRN, experts with biases",
        {
            **BASE,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "gemma2": Family(
        "soft caps of scores and of logits, every other layer with a sliding window, norms behind the mixers, scaled "
        "embeddings",
        {
            **BASE,
            "head_dim": 16,
            "sliding_window": 20,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3_text": Family(
        "local and global rotation, sliding windows, norms of q and k and behind the mixers, scaled embeddings",
        {
            **BASE,
            "head_dim": 16,
            "sliding_window": 7,
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 8.0,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma": Family("scaled embeddings", {**BASE, "head_dim": 16}),
    "phi3": Family(
        "q, k and v as one product, one sliding window in all layers",
        {**BASE, "sliding_window": 12, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "olmo2": Family("norms behind the mixers only, norms of q and k over all heads", BASE),
    "olmo3": Family(
        "as olmo2, with sliding windows and a rotation for each layer type",
        {
            **BASE,
            "sliding_window": 9,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "rope_parameters": {
                FULL: {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                },
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "granite": Family(
        "factors of embeddings, residuals, scores and logits",
        {
            **BASE,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 2.5,
        },
    ),
    "smollm3": Family("layers without rotation", {**BASE, "no_rope_layers": [1, 0, 1, 0]}),
    "cohere2": Family(
        "attention beside the feed-forward part, no rotation without a window, LayerNorm, a factor of logits",
        {**BASE, "sliding_window": 7, "layer_types": [SLIDING, SLIDING, FULL, SLIDING], "logit_scale": 0.3},
    ),
    "exaone4": Family(
        "norms behind the mixers only, no rotation without a window",
        {**BASE, "head_dim": 16, "sliding_window": 18, "layer_types": [SLIDING, SLIDING, FULL, SLIDING]},
    ),
    "glm4": Family("norms before and behind the mixers, interleaved partial rotation", {**BASE, "head_dim": 16}),
    "nemotron_h": Family("a mixer or a feed-forward a layer, experts, no rotation, limited time steps", NEMOTRON),
    "granitemoehybrid": Family(
        "factors of embeddings, scores, residuals and logits; without and with experts, with and without rotation",
        {**GRANITE, "num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": "rope"},
    ),
    "falcon_h1": Family("both mixers in every layer, factors everywhere, gates without and with a norm", FALCON),
    "bamba": Family("partial rotation", {**BASE, "attn_layer_indices": [1], **MAMBA2}),
    "mamba2": Family(
        "no attention",
        {
            "vocab_size": 256,
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 16,
            "expand": 2,
            "n_groups": 2,
            "chunk_size": 16,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "initializer_range": 0.3,
        },
    ),
    "lfm2": Family(
        "gated, without an activation",
        {
            **BASE,
            "layer_types": ["conv", "conv", FULL, "conv"],
            "conv_L_cache": 3,
            "conv_bias": True,
            "block_auto_adjust_ff_dim": False,
        },
    ),
}
# What members of a family do differently: the model type and a word.
VARIANTS: dict[str, dict[str, Any]] = {
    "granitemoehybrid experts": {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2},  # and no rotation
    "falcon_h1 norm": {**FALCON, "mamba_rms_norm": True, "mamba_n_groups": 2},
    "falcon_h1 gate": {**FALCON, "mamba_rms_norm": True, "mamba_n_groups": 2, "mamba_norm_before_gate": False},
    "nemotron_h latent": {
        **NEMOTRON,
        "layers_block_type": ["mamba", "moe", "attention"],
        "moe_latent_size": 32,
        "use_bias": True,
        "use_conv_bias": False,
    },
}


def tiny_config(model_type: str, **changes: Any) -> Any:
    """The tiny configuration of a family or a variant, changed."""
    config = VARIANTS.get(model_type) or FAMILIES[model_type].config
    return AutoConfig.for_model(model_type.split()[0], **{**config, **changes})


def save_tiny(model_type: str, directory: Path, **changes: Any) -> Any:
    """Builds and saves a random model; returns transformers' own, in float32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **changes), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in name:  # else a swapped or forgotten norm goes unnoticed
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if name.endswith(("bias", "sinks", ".D")):  # likewise
                parameter.add_(torch.randn_like(parameter))
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # some versions of transformers forget the cap elsewhere
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    return model

"""Tiny random target models of every supported architecture, saved as checkpoints.

Their weights are wide (0.3): at transformers' default of 0.02 a polluted recurrent state moves no logit.
"""

from __future__ import annotations

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
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": BASE,
    "qwen2": BASE,
    "qwen3": {**BASE, "head_dim": 16},
    "mistral": {**BASE, "sliding_window": 16, "head_dim": 16},
    "qwen3_next": {**BASE, "head_dim": 16, **GDN, **MOE, "decoder_sparse_step": 1},
    "qwen3_5_text": {**BASE, "head_dim": 16, **GDN},
    "qwen3_5_moe_text": {**BASE, "head_dim": 16, **GDN, **MOE},
}


def save_tiny(architecture: str, directory: Path, **changes: Any) -> Any:
    """Builds and saves a random model; returns transformers' own, in float32."""
    config = AutoConfig.for_model(architecture, **{**ARCHITECTURES[architecture], **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in name:  # else a swapped or forgotten norm goes unnoticed
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    return model

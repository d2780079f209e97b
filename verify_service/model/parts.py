"""Where transformers' models of different families keep their parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

_FINAL_NORMS = ("norm", "norm_f", "final_layernorm", "embedding_norm")


@dataclass(frozen=True, slots=True)
class ModelParts:
    """A causal language model's parts."""

    embed: nn.Module
    layers: list[Any]
    rotary: Any  # None: positions are not rotated
    norm: nn.Module
    head: nn.Linear


def read_parts(model: Any) -> ModelParts:
    """Takes a model apart."""
    inner = model.base_model
    return ModelParts(
        embed=inner.get_input_embeddings(),
        layers=list(inner.layers),
        rotary=getattr(inner, "rotary_emb", None),
        norm=next(getattr(inner, name) for name in _FINAL_NORMS if hasattr(inner, name)),
        head=model.lm_head,
    )

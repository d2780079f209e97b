"""Tables of rotary position embeddings for every position that a service can meet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draft_service.model.config import DrafterConfig, refused

# Types whose frequencies do not change with the length of the sequence; transformers computes them.
_SCALED_TYPES = ("linear", "yarn", "llama3")


def rope_tables(
    config: DrafterConfig, num_positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:  # [num_positions, head_dim] each
    """Cosines and sines in the half-split form."""
    inverse, factor = _frequencies(config)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse
    angles = torch.cat([angles, angles], -1)
    return (angles.cos() * factor).to(device, dtype), (angles.sin() * factor).to(device, dtype)


def _frequencies(config: DrafterConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] and the factor on cosines and sines."""
    kind, theta = config.rope_parameters["rope_type"], config.rope_parameters["rope_theta"]
    if kind == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / theta**exponents, 1.0
    if kind not in _SCALED_TYPES:
        raise refused("rope_type", kind, f"only default, {', '.join(_SCALED_TYPES)} are served")
    from transformers import PreTrainedConfig  # costs a second and is seldom needed
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = dict(config.rope_parameters)
    if kind == "yarn":
        parameters.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    sizes: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": parameters,
    }
    try:
        settings = PreTrainedConfig(**sizes)
        inverse, factor = ROPE_INIT_FUNCTIONS[kind](settings, torch.device("cpu"))
    except (KeyError, TypeError, ValueError) as error:
        raise refused("rope_parameters", parameters, f"incomplete for {kind} ({error})") from error
    return inverse.float(), float(factor)

"""What transformers makes of a configuration, looked up without weights: names for what cannot be served."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

_OTHER_PARTS = ("norm", "ln", "mlp", "feed_forward", "ff")


def first_mixer(config: Any) -> str:
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
        if not any(word in name for word in _OTHER_PARTS) and any(True for _ in part.parameters())
    ]
    return next((mixer for mixer in mixers if "Attention" not in mixer), mixers[0] if mixers else "")

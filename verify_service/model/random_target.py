"""A target from its configuration alone: transformers' model of that shape, its weights drawn where they are served."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from draftwood.random_weights import random_tensor
from verify_service.model.replace_layers import CENTRED_NORMS


def random_target(loader: Any, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The causal language model of class `loader`, with the weights of `draftwood.random_weights`."""
    with _parameters_on_meta():
        model = loader._from_config(config, dtype=dtype, attn_implementation="eager")
    drawn: dict[nn.Parameter, nn.Parameter] = {}  # by what they replace: tied weights stay one
    for prefix, module in model.named_modules():
        is_centred = type(module).__name__ in CENTRED_NORMS
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in drawn:
                name = f"{prefix}.{leaf}" if prefix else leaf
                value = random_tensor(name, tuple(parameter.shape), parameter.dtype, device, is_centred=is_centred)
                drawn[parameter] = nn.Parameter(value, requires_grad=False)
            module.register_parameter(leaf, drawn[parameter])
    return model


@contextmanager
def _parameters_on_meta() -> Generator[None]:
    """Modules that are made here have their buffers, which are computed, but no memory for parameters."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            value: Tensor = parameter.detach().to("meta")
            parameter = nn.Parameter(value, requires_grad=False)
        register(module, name, parameter)

    with patch.object(nn.Module, "register_parameter", on_meta):
        yield

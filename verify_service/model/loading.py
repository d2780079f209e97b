"""Loads a target through transformers: text models, also out of checkpoints that wrap one in a multimodal model."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging
from transformers.utils.quantization_config import Mxfp4Config

from draftwood.errors import UnsupportedModelError
from draftwood.random_weights import random_tensor
from verify_service.core.target_spec import TargetSpec
from verify_service.model.replace_layers import CENTRED_NORMS
from verify_service.model.rope import check_rope
from verify_service.model.spec import SUPPORTED, read_spec, text_config

# Multimodal checkpoints keep the text model's tensors one level down.
_KEY_MAPPING = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}

# What transformers' configurations raise, which compute with what they read.
_CONFIG_FAULTS = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, StrictDataclassError)


def read_target(directory: Path, *, allow_unsafe: bool = False) -> tuple[Any, TargetSpec]:
    """The checkpoint's configuration, and the spec of the text model in it. Raises UnsupportedModelError."""
    try:
        config = AutoConfig.from_pretrained(directory)
    except _CONFIG_FAULTS as error:
        raise UnsupportedModelError(f"{directory}/config.json: {error}", field="config.json") from error
    return config, read_spec(text_config(config), _stop_token_ids(directory, config), allow_unsafe=allow_unsafe)


def model_class(spec: TargetSpec) -> Any:
    """Transformers' class of the causal language model."""
    is_known = spec.model_type in SUPPORTED
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[spec.model_type] if is_known else "AutoModelForCausalLM"
    return getattr(transformers, name)


def load_target(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    allow_unsafe: bool = False,
    random_weights: bool = False,
) -> tuple[Any, TargetSpec]:
    """The transformers causal language model, in evaluation mode, and its spec.

    Raises UnsupportedModelError naming the architecture, layer or tensor that cannot be served.
    """
    full, spec = read_target(directory, allow_unsafe=allow_unsafe)
    config, loader = text_config(full), model_class(spec)
    check_rope(config)
    if random_weights:
        return random_target(loader, config, dtype, device).to(device).eval().requires_grad_(False), spec
    quantization = _quantization(full, config)
    if not [*directory.glob("*.safetensors"), *directory.glob("*.bin")]:
        raise UnsupportedModelError(
            f"{directory} has a config.json and no weights; --random-weights serves such a shape", field="target"
        )
    transformers_logging.disable_progress_bar()  # a service's log is no terminal
    model, report = loader.from_pretrained(
        directory,
        config=config,
        dtype=dtype,
        attn_implementation="eager",
        output_loading_info=True,
        key_mapping=_KEY_MAPPING if config is not full else None,
        **quantization,
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise UnsupportedModelError(
            f"{directory} lacks the tensor {missing[0]} ({len(missing)} in all)", field=missing[0]
        )
    return model.to(device).eval().requires_grad_(False), spec


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


def _quantization(full: Any, config: Any) -> dict[str, Any]:
    """How quantised weights are loaded: those of gpt-oss as plain numbers. Raises UnsupportedModelError for others."""
    settings = getattr(config, "quantization_config", None) or getattr(full, "quantization_config", None)
    if settings is None:
        return {}
    method = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
    if method != "mxfp4":
        raise UnsupportedModelError(
            f"quantization_config.quant_method is {method!r}; quantised weights are not served, except mxfp4, which is "
            "loaded as plain numbers",
            field="quantization_config.quant_method",
        )
    return {"quantization_config": Mxfp4Config(dequantize=True)}


def _stop_token_ids(directory: Path, config: Any) -> tuple[int, ...]:
    """End-of-text tokens: the generation configuration's, else the model configuration's."""
    sources = [config, text_config(config)]
    if (directory / "generation_config.json").is_file():
        sources.insert(0, GenerationConfig.from_pretrained(directory))
    ids: Any = next((ids for source in sources if (ids := getattr(source, "eos_token_id", None)) is not None), ())
    return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)

"""Loads a target through transformers: text models, also out of checkpoints that wrap one in a multimodal model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GenerationConfig
from transformers.utils import logging as transformers_logging
from transformers.utils.quantization_config import Mxfp4Config

from draftwood.errors import UnsupportedModelError
from verify_service.core.target_spec import TargetSpec
from verify_service.model.random_target import random_target
from verify_service.model.rope import check_rope
from verify_service.model.spec import SUPPORTED, read_spec, text_config

# Multimodal checkpoints keep the text model's tensors one level down.
_KEY_MAPPING = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}

log = logging.getLogger(__name__)


# What transformers' configurations raise, which compute with what they read.
_CONFIG_FAULTS = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, StrictDataclassError)


def full_config(directory: Path) -> Any:
    """The checkpoint's configuration as transformers reads it. Raises UnsupportedModelError."""
    try:
        return AutoConfig.from_pretrained(directory)
    except _CONFIG_FAULTS as error:
        raise UnsupportedModelError(f"{directory}/config.json: {error}", field="config.json") from error


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
    full = full_config(directory)
    config = text_config(full)
    spec = read_spec(config, stop_token_ids(directory, full), allow_unsafe=allow_unsafe)
    check_rope(config)
    loader = getattr(transformers, SUPPORTED.get(spec.model_type, "AutoModelForCausalLM"))
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


def stop_token_ids(directory: Path, config: Any) -> tuple[int, ...]:
    """End-of-text tokens: the generation configuration's, else the model configuration's."""
    ids: Any = None
    if (directory / "generation_config.json").is_file():
        ids = GenerationConfig.from_pretrained(directory).eos_token_id
    if ids is None:
        ids = getattr(config, "eos_token_id", None)
    if ids is None:
        ids = getattr(text_config(config), "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)

"""Models and settings that cannot be served are refused by name before anything runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from draftwood.errors import ConfigError, DraftwoodError, ModelMismatchError, UnsupportedModelError
from tests.verify_service.harness import config_of
from tests.verify_service.models import BASE, save_tiny, tiny_config
from verify_service.build import build


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("tiny")
    save_tiny("qwen3", directory)
    return directory


def refused(target: Path, **settings: Any) -> DraftwoodError:
    with pytest.raises(DraftwoodError) as caught:
        build(config_of(target, **settings))
    return caught.value


def copy_with(source: Path, directory: Path, config: dict[str, Any], without: str = "") -> Path:
    """The checkpoint with a changed configuration, or lacking a tensor."""
    (directory / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | config))
    tensors = load_file(source / "model.safetensors")
    tensors.pop(without, None)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


UNSUPPORTED = {
    "mamba": ("MambaMixer", {"state_size": 8}),
    "falcon_mamba": ("FalconMambaMixer", {"state_size": 8}),
    "rwkv": ("RwkvSelfAttention", {"attention_hidden_size": 64}),
    "jamba": ("JambaMambaMixer", {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 2}),
    "recurrent_gemma": ("RecurrentGemmaRecurrentBlock", {"num_attention_heads": 4, "lru_width": 64}),
}


@pytest.mark.parametrize("architecture", list(UNSUPPORTED))
def test_architecture_without_an_adapter(tmp_path: Path, architecture: str) -> None:
    """Named with the layer whose state a rejected draft would stay in, and with what would do."""
    mixer, settings = UNSUPPORTED[architecture]
    AutoConfig.for_model(architecture, num_hidden_layers=2, hidden_size=64, **settings).save_pretrained(tmp_path)
    error = refused(tmp_path)
    assert isinstance(error, UnsupportedModelError)
    assert error.field == "model_type"
    for part in (f"{architecture!r}", ".0.", mixer, "qwen3"):
        assert part in error.message


def test_recurrent_layer_without_an_adapter_is_named(tiny: Path, tmp_path: Path) -> None:
    """A layer type that the architecture has and the adapters do not."""
    layers = ["full_attention", "full_attention", "chunked_attention", "full_attention"]
    error = refused(copy_with(tiny, tmp_path, {"layer_types": layers}))
    assert isinstance(error, UnsupportedModelError)
    assert error.field == "layer_types[2]"
    for part in ("layer 2", "chunked_attention", "qwen3", "--allow-hybrid-unsafe"):
        assert part in error.message


def test_convolution_with_another_activation(tmp_path: Path) -> None:
    save_tiny("mamba2", tmp_path, hidden_act="gelu")
    error = refused(tmp_path)
    assert isinstance(error, UnsupportedModelError)
    assert error.field == "hidden_act"
    for part in ("layer 0", "gelu", "silu"):
        assert part in error.message


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional"])
def test_rope_that_depends_on_the_length(tiny: Path, tmp_path: Path, kind: str) -> None:
    """Committed keys would have to be rotated anew as the sequence grows."""
    half = BASE["hidden_size"] // BASE["num_attention_heads"] // 2
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * half, "long_factor": [2.0] * half, "original_max_position_embeddings": 256}
    error = refused(copy_with(tiny, tmp_path, {"rope_parameters": rope}))
    assert isinstance(error, UnsupportedModelError)
    assert error.field == "rope_parameters.rope_type"
    assert f"rope_parameters.rope_type is '{kind}'" in error.message
    assert "yarn" in error.message  # what would do


def test_rope_of_one_layer_type_is_named(tmp_path: Path) -> None:
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0},
    }
    tiny_config("gemma3_text", rope_parameters=rope).save_pretrained(tmp_path)
    error = refused(tmp_path)
    assert isinstance(error, UnsupportedModelError)
    assert error.field == "rope_parameters.full_attention.rope_type"
    assert "rope_parameters.full_attention.rope_type is 'dynamic'" in error.message


def test_bidirectional_attention_is_named(tmp_path: Path) -> None:
    """As in embedding models made of Gemma 3: a token would see those behind it."""
    tiny_config("gemma3_text", use_bidirectional_attention=True).save_pretrained(tmp_path)
    error = refused(tmp_path)
    assert isinstance(error, UnsupportedModelError)
    assert error.field == "use_bidirectional_attention"
    assert "use_bidirectional_attention is True" in error.message


def test_missing_tensor_is_named(tiny: Path, tmp_path: Path) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    error = refused(copy_with(tiny, tmp_path, {}, without=name))
    assert isinstance(error, UnsupportedModelError)
    assert name in error.message
    assert error.field == name


def test_config_without_weights(tiny: Path, tmp_path: Path) -> None:
    shutil.copy(tiny / "config.json", tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"a config\.json and no weights; --random-weights"):
        build(config_of(tmp_path))


def test_no_such_directory(tmp_path: Path) -> None:
    error = refused(tmp_path / "nowhere")
    assert isinstance(error, ConfigError)
    assert "nowhere" in error.message
    assert error.field == "target"


def test_broken_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    error = refused(tmp_path)
    assert isinstance(error, UnsupportedModelError)
    assert error.field == "config.json"


def test_context_beyond_the_model(tiny: Path) -> None:
    error = refused(tiny, max_context=513)
    assert isinstance(error, ConfigError)
    assert error.field == "max_context"
    assert "513" in error.message
    assert "512" in error.message


def draft_of(directory: Path, *, taps: int = 2, hidden: int = 64, without: str = "", **config: Any) -> Path:
    """A draft checkpoint's projection."""
    values = {"num_hidden_layers": 2, "rms_norm_eps": 1e-6, "dflash_config": {"target_layer_ids": [0, 2]}} | config
    (directory / "config.json").write_text(json.dumps(values))
    tensors = {"fc.weight": torch.randn(hidden, taps * hidden), "hidden_norm.weight": torch.ones(hidden)}
    tensors.pop(without, None)
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_drafter_of_another_hidden_size(tiny: Path, tmp_path: Path) -> None:
    error = refused(tiny, draft=str(draft_of(tmp_path, hidden=48)))
    assert isinstance(error, ModelMismatchError)
    assert error.field == "fc.weight"
    assert "96" in error.message
    assert "64" in error.message


def test_drafter_of_a_deeper_target(tiny: Path, tmp_path: Path) -> None:
    error = refused(tiny, draft=str(draft_of(tmp_path, dflash_config={"target_layer_ids": [0, 4]})))
    assert isinstance(error, ModelMismatchError)
    assert error.field == "target_layer_ids"
    assert "[0, 4]" in error.message
    assert "4" in error.message


@pytest.mark.parametrize("name", ["fc.weight", "hidden_norm.weight"])
def test_drafter_without_a_projection(tiny: Path, tmp_path: Path, name: str) -> None:
    error = refused(tiny, draft=str(draft_of(tmp_path, without=name)))
    assert isinstance(error, UnsupportedModelError)
    assert error.field == name
    assert name in error.message


def test_embedded_drafter_of_another_target(tiny: Path) -> None:
    assert isinstance(refused(tiny, draft="embedded"), ModelMismatchError)

"""Checkpoints whose tensors are not laid out as the served model's: text models inside others, quantised weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from draftwood.errors import UnsupportedModelError
from tests.verify_service.models import save_tiny
from verify_service.model.loading import load_target

CPU = torch.device("cpu")
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])  # E2M1


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize(
    ("wrapper", "family"), [("gemma3", "gemma3_text"), ("mistral3", "mistral"), ("qwen3_5", "qwen3_5_text")]
)
def test_text_model_inside_a_multimodal_one(wrapper: str, family: str, prefix: str, tmp_path: Path) -> None:
    model = save_tiny(family, tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    AutoConfig.for_model(wrapper, text_config=text).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {
        name.replace("model.", prefix, 1) if name.startswith("model.") else name: tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, spec = load_target(tmp_path, torch.float32, CPU)
    assert spec.model_type == family
    wanted = dict(model.named_parameters())
    found: dict[str, Tensor] = dict(loaded.named_parameters())
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """MXFP4 as numbers (OCP Microscaling Formats 1.0): two E2M1 a byte, the lower half first, times 2^(scale - 127)."""
    values = FP4[torch.stack([blocks & 15, blocks >> 4], -1).long()].flatten(-2)  # [E, out, groups, 32]
    return (values * torch.exp2(scales.float() - 127)[..., None]).flatten(-2)  # [E, out, in]


def test_gpt_oss_in_mxfp4_is_loaded_as_plain_numbers(tmp_path: Path) -> None:
    """As gpt-oss is published: experts packed, everything else plain."""
    save_tiny("gpt_oss", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    wanted: dict[str, Tensor] = {}
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num_experts, inputs, outputs = tensors.pop(name).shape
        size = (num_experts, outputs, inputs // 32)
        blocks = torch.randint(256, (*size, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 126, size, dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        wanted[name] = unpacked(blocks, scales).transpose(1, 2)
    assert len(wanted) == 8
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    change_config(tmp_path, quantization_config=settings)
    model, _ = load_target(tmp_path, torch.float32, CPU)
    found = dict(model.named_parameters())
    assert [name for name, weight in wanted.items() if not torch.equal(found[name], weight)] == []


@pytest.mark.parametrize("method", ["awq", "fp8", "bitsandbytes"])
def test_other_quantised_weights_are_refused(method: str, tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    change_config(tmp_path, quantization_config={"quant_method": method})
    with pytest.raises(UnsupportedModelError) as caught:
        load_target(tmp_path, torch.float32, CPU)
    assert caught.value.field == "quantization_config.quant_method"
    assert f"quantization_config.quant_method is '{method}'" in caught.value.message


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

"""What is put in place of a decoder layer's parts computes the same, and what does not match stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from draftwood.device.layers import GatedMLP
from tests.verify_service.models import FAMILIES, FULL, SLIDING, tiny_config
from verify_service.core.target_spec import ATTENTION
from verify_service.cpu.layers import ADAPTERS
from verify_service.model.layer_groups import kind_of
from verify_service.model.replace_layers import replace_parts, replaced_norm
from verify_service.model.spec import read_spec

# Not an RMSNorm; those in front of which the layer casts to their weight's format. Neither are those that are `Gated`,
# which makes them part of the mixer.
NOT_FUSED = {"Cohere2LayerNorm", "NemotronHRMSNorm", "Mamba2RMSNorm"}


def tiny_model(model_type: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(model_type, **changes)).eval().requires_grad_(False)


def fuse_layers(model: Any) -> list[bool]:
    """Which of the model's layers can be compiled, with their parts replaced."""
    mixers = read_spec(model.config, ()).mixers
    return [replace_parts(layer, i, mixers[i], ADAPTERS) for i, layer in enumerate(model.base_model.layers)]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_fused_norms_are_transformers_norms(model_type: str) -> None:
    """Some families multiply with w, others with 1 + w."""
    norms: dict[str, nn.Module] = {
        type(m).__name__: m
        for m in tiny_model(model_type).modules()
        if type(m).__name__.endswith(("Norm", "NormGated"))
    }
    assert norms
    for name, norm in norms.items():
        if name in NOT_FUSED or name.endswith("Gated"):
            assert replaced_norm(norm) is norm
            continue
        weight: Any = norm.weight
        weight.add_(torch.randn_like(weight))
        x = 3.0 * torch.randn(5, weight.shape[0])
        fused = replaced_norm(norm)
        assert fused is not norm, name
        torch.testing.assert_close(fused(x), norm(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "relu"])
def test_fused_feed_forward_keeps_its_activation(activation: str) -> None:
    layer = tiny_model("qwen3", hidden_act=activation).model.layers[0]
    before, x = layer.mlp, torch.randn(3, 64)
    wanted = before(x)
    assert replace_parts(layer, 0, (ATTENTION,), ADAPTERS)
    assert isinstance(layer.mlp, GatedMLP)
    torch.testing.assert_close(layer.mlp(x), wanted, rtol=1e-5, atol=1e-5)


def test_experts_stay_and_have_no_graph() -> None:
    model = tiny_model("qwen3_moe")  # layer 1 is dense
    layers = model.model.layers
    blocks = [layer.mlp for layer in layers]
    assert fuse_layers(model) == [False, True, False, False]
    assert [layer.mlp is block for layer, block in zip(layers, blocks, strict=True)] == [True, False, True, True]


@pytest.mark.parametrize(
    ("model_type", "changes", "kinds"),
    [
        ("qwen3", {}, "aaaa"),
        ("qwen3", {"layer_types": [SLIDING, FULL] * 2, "use_sliding_window": True, "sliding_window": 9}, "abab"),
        ("gemma2", {}, "abab"),
        ("gemma3_text", {}, "aaba"),
        ("smollm3", {}, "abab"),
        ("qwen3_5_text", {}, "aaab"),
        ("falcon_h1", {}, "aaaa"),
        ("bamba", {}, "abaa"),
        ("mamba2", {}, "aaaa"),
        ("lfm2", {}, "aaba"),
        ("nemotron_h", {"layers_block_type": ["mamba", "attention", "mlp", "mamba", "mlp"]}, "abcac"),
    ],
)  # fmt: skip
def test_layers_of_one_kind_share_a_graph(model_type: str, changes: dict[str, Any], kinds: str) -> None:
    """Graphs have no guards on modules: one that has a window baked in must not run a layer without."""
    model = tiny_model(model_type, **changes)
    assert all(fuse_layers(model))
    found = [kind_of(layer) for layer in model.base_model.layers]
    letters = {kind: "abcd"[i] for i, kind in enumerate(dict.fromkeys(found))}
    assert "".join(letters[kind] for kind in found) == kinds

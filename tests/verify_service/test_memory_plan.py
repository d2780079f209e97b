"""What the verify service says that it will hold, against what it allocates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftwood.config import VerifyConfig
from draftwood.errors import ConfigError, UnsupportedModelError
from tests.verify_service.models import FAMILIES, tiny_config
from verify_service.build import build
from verify_service.memory_plan import plan

QWEN_27B = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 5120, "num_hidden_layers": 64,
    "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 17408,
    "vocab_size": 248320, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}  # fmt: skip


def test_a_plan_is_what_the_service_allocates() -> None:
    config = VerifyConfig(drafter="none", compile=False, max_batch=3, max_context=100, page_size=8)
    sizes, pools = plan(config), build(config).engine.runner.pools
    assert sizes["KV pages"] == pools.keys.nbytes + pools.values.nbytes
    assert sizes["recurrent states"] == pools.states.nbytes + pools.windows.nbytes
    assert sizes["feature rows"] == pools.features.nbytes > 0


def test_a_plan_needs_no_weights(tmp_path: Path) -> None:
    """The layers and the head of a 27B hybrid are 51.2 GB in bfloat16, and its embedding is as large as its head."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN_27B))
    sizes = plan(VerifyConfig(target=str(tmp_path), draft="none", dtype="bfloat16", max_batch=1, max_context=1024))
    table = 2 * 248320 * 5120
    assert sizes["weights"] == pytest.approx(51.2e9 + table, rel=0.002)
    assert sizes["KV pages"] == 16 * 2 * 2 * 4 * 256 * (1024 + 64)  # layers, K and V, bytes, heads, size, slots
    assert sizes["recurrent states"] == 48 * 2 * (4 * 48 * 128 * 128 + 2 * 3 * (2 * 16 + 48) * 128)
    assert sizes["feature rows"] == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_a_plan(name: str, tmp_path: Path) -> None:
    tiny_config(name).save_pretrained(tmp_path)
    sizes = plan(VerifyConfig(target=str(tmp_path), draft="none", max_batch=2, max_context=64))
    assert sizes["weights"] > 0
    assert sizes["KV pages"] + sizes["recurrent states"] > 0


def test_twice_the_batch_needs_twice_the_pages() -> None:
    one, two = (plan(VerifyConfig(draft="none", max_batch=n, max_context=64, page_size=64)) for n in (3, 7))
    assert two["KV pages"] == 2 * one["KV pages"]  # a scratch page each
    assert two["weights"] == one["weights"]


def test_what_cannot_be_served_has_no_plan(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "hidden_size": 64, "vocab_size": 256}))
    with pytest.raises(UnsupportedModelError, match="mamba"):
        plan(VerifyConfig(target=str(tmp_path), draft="none"))
    with pytest.raises(ConfigError, match="--max-context is 4096, more than the 2048 positions"):
        plan(VerifyConfig(max_context=4096))


def test_caches_larger_than_the_memory_are_refused_at_the_start() -> None:
    config = VerifyConfig(drafter="none", compile=False, page_size=1024, cache_tokens=1 << 31)
    with pytest.raises(ConfigError, match=r"--max-batch 8 sequences of 2048 tokens .*\(KV pages [\d.]+ GiB, recurrent"):
        build(config)


LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100}


@pytest.mark.parametrize(
    "config", [{}, {"model_type": "zzz"}, LLAMA | {"hidden_size": "x"}, LLAMA | {"num_attention_heads": 0}]
)
def test_a_config_that_transformers_does_not_take_is_refused_by_name(tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"config\.json"):
        plan(VerifyConfig(target=str(tmp_path), draft="none"))


@pytest.mark.parametrize("config", [{}, {"hidden_size": "x"}, {"hidden_size": 0}])
def test_a_draft_model_without_a_size_is_refused_by_name(tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="hidden_size"):
        plan(VerifyConfig(draft=str(tmp_path)))

"""What is read from checkpoints, and that whatever cannot be served is refused by name."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_service.model.config import LayerAttention, read_drafter_config
from draft_service.model.rope import rope_tables
from draft_service.model.tensors import load_drafter_tensors, load_target_tensors
from draftwood.checkpoint import EMBEDDED_DRAFT, default_target_layer_ids, load_tensors, projection_checksum
from draftwood.errors import ConfigError, ModelMismatchError, UnsupportedModelError
from tests.draft_service.plain_dflash import SLIDING, TINY, write_pair

FLASH: dict[str, Any] = TINY["dflash_config"]


def with_flash(**values: Any) -> dict[str, Any]:
    return {"dflash_config": FLASH | values}


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(directory: Path, **changes: Tensor | None) -> None:
    tensors = load_file(directory / "model.safetensors") | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, directory / "model.safetensors")


def test_embedded_config() -> None:
    config = read_drafter_config(EMBEDDED_DRAFT)
    assert (config.block_size, config.max_depth, config.mask_token_id) == (16, 15, 3)
    assert config.target_layer_ids == (1, 4, 6)
    assert config.layers == (LayerAttention(None, False),) * 3
    assert config.context_window == 0


def test_dflash_config_comes_first(tmp_path: Path) -> None:
    draft, _ = write_pair(tmp_path, block_size=9, **with_flash(block_size=5, num_target_layers=8))
    assert (read_drafter_config(draft).block_size, read_drafter_config(draft).num_target_layers) == (5, 8)


def test_default_target_layers(tmp_path: Path) -> None:
    assert default_target_layer_ids(1, 36) == (18,)
    assert default_target_layer_ids(5, 36) == (1, 9, 17, 25, 33)
    assert default_target_layer_ids(5, 64) == (1, 16, 31, 46, 61)
    draft, _ = write_pair(tmp_path, dflash_config={"mask_token_id": 130})
    assert read_drafter_config(draft).target_layer_ids == (1, 4, 6)


def test_block_size_override(tmp_path: Path) -> None:
    config = read_drafter_config(write_pair(tmp_path)[0])
    assert config.with_block_size(0) == config
    assert config.with_block_size(4).max_depth == 3
    with pytest.raises(ConfigError, match=r"--block-size is 8, not in \[2, 7\]"):
        config.with_block_size(8)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "architectures is .*DFlash2DraftModel"),
        ({"architectures": ["DFlashLagunaForCausalLM"]}, "DFlashLagunaForCausalLM"),
        (with_flash(projector_type="domino"), "projector_type is 'domino'"),
        (with_flash(conv_kernel_size=2), "conv_kernel_size is 2"),
        (with_flash(selector_rank=256), "selector_rank is 256"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (
            {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
            "layer_types is .*linear_attention",
        ),
        ({"layer_types": SLIDING}, "sliding_window is None"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4"),
        (with_flash(mask_token_id=131), "mask_token_id is 131"),
        (with_flash(target_layer_ids=[1, 9]), r"target_layer_ids is \[1, 9\]"),
        ({"rope_theta": None}, "rope_theta is None"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters is .*full_attention"),
        ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"block_size": "16"}, "block_size is '16'"),
        ({"hidden_size": None}, "no hidden_size"),
        (with_flash(output_multiplier="big"), "output_multiplier is 'big'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_layouts_are_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    draft, _ = write_pair(tmp_path)
    edit_config(draft, **changes)
    with pytest.raises(UnsupportedModelError, match=named):
        read_drafter_config(draft)


def test_unknown_rope_types_are_named(tmp_path: Path) -> None:
    draft, _ = write_pair(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0})
    with pytest.raises(UnsupportedModelError, match="rope_type is 'dynamic'"):
        rope_tables(read_drafter_config(draft), 8, torch.float32, torch.device("cpu"))


def test_scaled_rope(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    plain = read_drafter_config(write_pair(tmp_path)[0])
    cos, sin = rope_tables(plain, 41, torch.float32, cpu)
    draft = tmp_path / "draft"
    edit_config(draft, rope_scaling={"type": "linear", "factor": 4.0})
    scaled = rope_tables(read_drafter_config(draft), 41, torch.float32, cpu)
    torch.testing.assert_close(scaled[0][4::4], cos[1:11])
    torch.testing.assert_close(scaled[1][4::4], sin[1:11])
    edit_config(draft, rope_scaling=None, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4})
    yarn, _ = rope_tables(read_drafter_config(draft), 4, torch.float32, cpu)
    assert yarn[0, 0] == pytest.approx(1.1386, abs=1e-4)  # 0.1 ln(factor) + 1
    edit_config(draft, rope_parameters={"rope_type": "llama3", "rope_theta": 1e4})
    with pytest.raises(UnsupportedModelError, match="incomplete for llama3"):
        rope_tables(read_drafter_config(draft), 4, torch.float32, cpu)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"norm.weight": None}, r"lacks the tensor norm.weight \[48\]"),
        ({"layers.2.self_attn.q_norm.weight": None}, "lacks the tensor layers.2.self_attn.q_norm.weight"),
        ({"layers.0.attention_conv.base_kernel": torch.zeros(2, 2, 48)}, "layers.0.attention_conv.base_kernel"),
        ({"aux_hidden_norms.0.weight": torch.zeros(48)}, "aux_hidden_norms.0.weight"),
        ({"layers.3.input_layernorm.weight": torch.zeros(48)}, "layers.3.input_layernorm.weight"),
        ({"fc.weight": torch.zeros(48, 144)}, r"fc.weight .* has shape \[48, 144\], not \[48, 96\]"),
    ],
    ids=str,
)
def test_wrong_tensors_are_named(tmp_path: Path, changes: dict[str, Tensor | None], named: str) -> None:
    draft, _ = write_pair(tmp_path)
    edit_tensors(draft, **changes)
    with pytest.raises(UnsupportedModelError, match=named):
        load_drafter_tensors(draft, read_drafter_config(draft))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 64}, "hidden_size is 64, .* 48"),
        ({"vocab_size": 132}, "vocab_size is 132, .* 131"),
        ({"num_hidden_layers": 8}, "num_hidden_layers is 8, .* 9"),
    ],
    ids=str,
)
def test_targets_that_do_not_match(tmp_path: Path, changes: dict[str, int], named: str) -> None:
    draft, target = write_pair(tmp_path)
    edit_config(target, **changes)
    with pytest.raises(ModelMismatchError, match=named):
        load_target_tensors(target, read_drafter_config(draft))


def test_targets_with_padded_tables(tmp_path: Path) -> None:
    draft, target = write_pair(tmp_path)
    edit_tensors(target, **{"lm_head.weight": torch.zeros(136, 48)})
    with pytest.raises(ModelMismatchError, match=r"lm_head.weight has shape \[136, 48\]"):
        load_target_tensors(target, read_drafter_config(draft))


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_wrapped_and_sharded_targets(tmp_path: Path, prefix: str) -> None:
    draft, target = write_pair(tmp_path)
    tables = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    embedding, head = tables["model.embed_tokens.weight"], tables["lm_head.weight"].bfloat16()
    save_file({f"{prefix}embed_tokens.weight": embedding}, target / "a.safetensors")
    save_file({"lm_head.weight": head}, target / "b.safetensors")
    names = {f"{prefix}embed_tokens.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    text = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({"text_config": text}))
    loaded = load_target_tensors(target, read_drafter_config(draft))
    assert torch.equal(loaded.embedding, embedding)
    assert torch.equal(loaded.head, head)
    (target / "config.json").write_text(json.dumps({"text_config": text | {"tie_word_embeddings": True}}))
    assert load_target_tensors(target, read_drafter_config(draft)).head.data_ptr() != head.data_ptr()
    tied = load_target_tensors(target, read_drafter_config(draft))
    assert tied.head is tied.embedding


def test_targets_without_a_head_are_tied(tmp_path: Path) -> None:
    draft, target = write_pair(tmp_path)
    edit_tensors(target, **{"lm_head.weight": None})
    loaded = load_target_tensors(target, read_drafter_config(draft))
    assert loaded.head is loaded.embedding
    edit_tensors(target, **{"model.embed_tokens.weight": None, "other": torch.zeros(1)})
    with pytest.raises(UnsupportedModelError, match="embed_tokens"):
        load_target_tensors(target, read_drafter_config(draft))


def test_quantised_tables_are_refused(tmp_path: Path) -> None:
    draft, target = write_pair(tmp_path)
    edit_tensors(target, **{"lm_head.weight": torch.zeros(131, 48, dtype=torch.int8)})
    with pytest.raises(UnsupportedModelError, match=r"lm_head.weight is stored as torch.int8"):
        load_target_tensors(target, read_drafter_config(draft))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_projection_checksum(tmp_path: Path, prefix: str) -> None:
    draft, _ = write_pair(tmp_path)
    tensors = {prefix + k: v.bfloat16() for k, v in load_file(draft / "model.safetensors").items()}
    save_file(tensors, draft / "model.safetensors")
    data = [tensors[f"{prefix}{n}.weight"].view(torch.uint8).numpy().tobytes() for n in ("fc", "hidden_norm")]
    assert projection_checksum(draft) == hashlib.sha256(b"".join(data)).hexdigest()
    edit_tensors(draft, **{f"{prefix}hidden_norm.weight": None})
    with pytest.raises(UnsupportedModelError, match=r"hidden_norm.weight"):
        projection_checksum(draft)


def test_single_tensors(tmp_path: Path) -> None:
    draft, _ = write_pair(tmp_path)
    assert load_tensors(draft, ["norm.weight"]).keys() == {"norm.weight"}
    with pytest.raises(UnsupportedModelError, match="lacks the tensor nothing"):
        load_tensors(draft, ["nothing"])

"""A DFlash drafter written straight from its description: no cache, no fusion, everything recomputed in float64."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TINY: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 56,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 256,
    "vocab_size": 131,
    "num_target_layers": 9,
    "block_size": 7,
    "dflash_config": {"mask_token_id": 130, "target_layer_ids": [1, 6]},
}
SLIDING = ["sliding_attention"] * 3
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def random_tensors(config: Mapping[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.2) + (len(shape) == 1)

    h, i, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, k = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    tensors = {"fc.weight": normal(h, 2 * h), "hidden_norm.weight": normal(h), "norm.weight": normal(h)}
    for n in range(config["num_hidden_layers"]):
        shapes = {
            "input_layernorm": (h,), "post_attention_layernorm": (h,), "self_attn.q_proj": (q, h),
            "self_attn.k_proj": (k, h), "self_attn.v_proj": (k, h), "self_attn.o_proj": (h, q),
            "self_attn.q_norm": (d,), "self_attn.k_norm": (d,), "mlp.gate_proj": (i, h), "mlp.up_proj": (i, h),
            "mlp.down_proj": (h, i),
        }  # fmt: skip
        tensors |= {f"layers.{n}.{name}.weight": normal(*shape) for name, shape in shapes.items()}
    return tensors


def write_pair(folder: Path, **changes: Any) -> tuple[Path, Path]:
    """A random draft model and what it needs of a target; returns both directories."""
    config = TINY | changes
    draft, target = folder / "draft", folder / "target"
    draft.mkdir()
    target.mkdir()
    (draft / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(config), draft / "model.safetensors")
    size = {k: config[k] for k in ("hidden_size", "vocab_size")} | {"num_hidden_layers": config["num_target_layers"]}
    (target / "config.json").write_text(json.dumps(size | {"tie_word_embeddings": False}))
    generator = torch.Generator().manual_seed(6)
    shape = (config["vocab_size"], config["hidden_size"])
    tables = {n: torch.randn(shape, generator=generator) * 0.3 for n in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file(tables, target / "model.safetensors")
    return draft, target


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:  # x [heads, rows, head_dim]
    d = x.shape[-1]
    angles = positions[:, None].double() * theta ** (-torch.arange(0, d, 2).double() / d)
    out = torch.empty_like(x)
    a, b = x[..., : d // 2], x[..., d // 2 :]
    out[..., : d // 2] = a * angles.cos() - b * angles.sin()
    out[..., d // 2 :] = b * angles.cos() + a * angles.sin()
    return out


def is_causal(config: Mapping[str, Any], kind: str) -> bool:
    if config.get("is_causal") is not None:
        return config["is_causal"]
    if config["dflash_config"].get("causal") is not None:
        return config["dflash_config"]["causal"]
    return kind == "sliding_attention"


def plain_logits(
    draft: Path, target: Path, rows: Tensor, root: int
) -> Tensor:  # rows [T, hidden]; [depths, vocabulary]
    """The block's logits behind a context of projected feature rows."""
    c = json.loads((draft / "config.json").read_text())
    w = {k.removeprefix("model."): v.double() for k, v in load_file(draft / "model.safetensors").items()}
    t = {k: v.double() for k, v in load_file(target / "model.safetensors").items()}
    flash, eps, d = c["dflash_config"], c["rms_norm_eps"], c["head_dim"]
    n, base = c["block_size"], rows.shape[0]
    ids = torch.tensor([root] + [flash["mask_token_id"]] * (n - 1))
    x = t["model.embed_tokens.weight"][ids] * flash.get("input_embedding_scale", 1.0)
    positions = torch.arange(base + n)
    theta = c["rope_parameters"]["rope_theta"] if "rope_parameters" in c else c["rope_theta"]
    for i, kind in enumerate(c.get("layer_types") or ["full_attention"] * c["num_hidden_layers"]):
        p = {k.removeprefix(f"layers.{i}.").removesuffix(".weight"): v for k, v in w.items()}
        y = norm(x, p["input_layernorm"], eps)
        everything = torch.cat([rows.double(), y])

        def heads(z: Tensor) -> Tensor:
            return z.view(z.shape[0], -1, d).transpose(0, 1)

        q = rope(norm(heads(y @ p["self_attn.q_proj"].T), p["self_attn.q_norm"], eps), positions[base:], theta)
        k = rope(norm(heads(everything @ p["self_attn.k_proj"].T), p["self_attn.k_norm"], eps), positions, theta)
        v = heads(everything @ p["self_attn.v_proj"].T)
        repeats = q.shape[0] // k.shape[0]
        scores = q @ k.repeat_interleave(repeats, 0).transpose(1, 2) / math.sqrt(d)
        for row in range(n):
            for column in range(base + n):
                distance = base + row - column
                hidden = column >= base and distance < 0 and is_causal(c, kind)
                if kind == "sliding_attention":
                    hidden |= distance >= c["sliding_window"] or (-distance >= c["sliding_window"])
                if hidden:
                    scores[:, row, column] = -math.inf
        out = scores.softmax(-1) @ v.repeat_interleave(repeats, 0)
        x = x + out.transpose(0, 1).reshape(n, -1) @ p["self_attn.o_proj"].T
        y = norm(x, p["post_attention_layernorm"], eps)
        gate = y @ p["mlp.gate_proj"].T
        x = x + (gate * gate.sigmoid() * (y @ p["mlp.up_proj"].T)) @ p["mlp.down_proj"].T
    x = norm(x, w["norm.weight"], eps)[0 if flash.get("sample_from_anchor") else 1 :]
    logits = x @ t["lm_head.weight"].T * flash.get("output_multiplier", 1.0)
    cap = flash.get("final_logit_softcapping")
    return torch.tanh(logits / cap) * cap if cap else logits

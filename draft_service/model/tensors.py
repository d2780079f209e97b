"""The tensors that drafting needs: the draft model's layers, and the target's embedding and head, nothing else.

The feature projection (fc, hidden_norm) is checked and left on disk: the verify side projects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draft_service.model.config import DrafterConfig
from draftwood.checkpoint import load_tensors, read_config, tensor_shapes
from draftwood.errors import ModelMismatchError, UnsupportedModelError
from draftwood.random_weights import random_checksum, random_tensor, random_tensors

PROJECTION = ("fc.weight", "hidden_norm.weight")

_EMBEDDINGS = (
    "model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "language_model.model.embed_tokens.weight",
    "embed_tokens.weight", "backbone.embeddings.weight", "model.embeddings.weight",
)  # fmt: skip
_HEADS = (
    "lm_head.weight", "model.lm_head.weight", "language_model.lm_head.weight", "model.language_model.lm_head.weight",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TargetTensors:
    """What a drafter borrows from its target, as stored."""

    embedding: Tensor  # [vocab_size, hidden_size]
    head: Tensor  # [vocab_size, hidden_size]; the embedding itself where they are tied


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a DFlash checkpoint."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for i in range(len(config.layers)):
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def load_drafter_tensors(directory: Path, config: DrafterConfig) -> dict[str, Tensor]:
    """The draft model's tensors without the projection, named without a `model.` prefix.

    Raises UnsupportedModelError where a tensor is missing, unknown, or of another shape than config.json implies.
    """
    expected = expected_shapes(config)
    stored = {name.removeprefix("model."): (name, shape) for name, shape in tensor_shapes(directory).items()}
    for name, (_, shape) in stored.items():
        if name not in expected:
            raise UnsupportedModelError(
                f"{directory} holds the tensor {name} {list(shape)}, which a DFlash model does not have", field=name
            )
    for name, shape in expected.items():
        if name not in stored:
            raise UnsupportedModelError(f"{directory} lacks the tensor {name} {list(shape)}", field=name)
        if stored[name][1] != shape:
            raise UnsupportedModelError(
                f"the tensor {name} in {directory} has shape {list(stored[name][1])}, not {list(shape)}", field=name
            )
    wanted = {stored[name][0]: name for name in expected if name not in PROJECTION}
    return {wanted[name]: tensor for name, tensor in load_tensors(directory, list(wanted)).items()}


def load_target_tensors(directory: Path, config: DrafterConfig) -> TargetTensors:
    """The target's embedding and head. Raises ModelMismatchError where target and drafter do not belong together."""
    top = read_config(directory)
    text: Mapping[str, Any] = top.get("text_config") or top
    _check_target(text, config)
    shapes = tensor_shapes(directory)
    embedding_name = _find(_EMBEDDINGS, shapes, directory)
    is_tied = bool(top.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    head_name = embedding_name if is_tied or not set(_HEADS) & shapes.keys() else _find(_HEADS, shapes, directory)
    for name in (embedding_name, head_name):
        if shapes[name] != (config.vocab_size, config.hidden_size):
            raise ModelMismatchError(
                f"the target's {name} has shape {list(shapes[name])}; the draft model needs "
                f"[{config.vocab_size}, {config.hidden_size}]",
                field=name,
            )
    tensors = load_tensors(directory, sorted({embedding_name, head_name}))
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UnsupportedModelError(
                f"the target's {name} is stored as {tensor.dtype}, not as plain floats", field=name
            )
    return TargetTensors(tensors[embedding_name], tensors[head_name])


def random_drafter_tensors(config: DrafterConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """What `load_drafter_tensors` gives, without a checkpoint."""
    shapes = {name: shape for name, shape in expected_shapes(config).items() if name not in PROJECTION}
    return random_tensors(shapes, dtype, device, owner="draft")


def random_target_tensors(
    directory: Path, config: DrafterConfig, dtype: torch.dtype, device: torch.device
) -> TargetTensors:
    """What `load_target_tensors` gives, of a target that has a configuration only; the names are transformers'."""
    top = read_config(directory)
    text: Mapping[str, Any] = top.get("text_config") or top
    _check_target(text, config)
    shape = (config.vocab_size, config.hidden_size)
    embedding = random_tensor(_EMBEDDINGS[0], shape, dtype, device)
    is_tied = bool(top.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    return TargetTensors(embedding, embedding if is_tied else random_tensor(_HEADS[0], shape, dtype, device))


def random_projection_checksum(config: DrafterConfig) -> str:
    """What the handshake compares where fc and hidden_norm are random."""
    return random_checksum({name: expected_shapes(config)[name] for name in PROJECTION})


def _check_target(text: Mapping[str, Any], config: DrafterConfig) -> None:
    pairs = (
        ("hidden_size", text.get("hidden_size"), config.hidden_size),
        ("vocab_size", text.get("vocab_size"), config.vocab_size),
        ("num_hidden_layers", text.get("num_hidden_layers"), config.num_target_layers),
    )
    for key, has, wants in pairs:
        if has != wants:
            raise ModelMismatchError(
                f"the target's {key} is {has}, the draft model was made for {wants}: they do not belong together. "
                "--draft names the drafter trained for the target; without it the embedded target's is taken",
                field=key,
            )


def _find(names: Sequence[str], shapes: Mapping[str, tuple[int, ...]], directory: Path) -> str:
    for name in names:
        if name in shapes:
            return name
    raise UnsupportedModelError(f"{directory} has none of the tensors {', '.join(names)}", field=names[0])

"""What the verify service will hold in memory, without loading weights.

`python -m verify_service.memory_plan FLAGS` prints JSON. Sizes come from the code that allocates, run on
torch's meta device.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from draftwood.checkpoint import read_config, resolve
from draftwood.config import VerifyConfig
from draftwood.device.placement import pick_device, pick_dtype
from draftwood.errors import UnsupportedModelError
from draftwood.memory import print_plan, resident_memory_bytes
from verify_service.build import META, cache_sizes, longest_context, pass_limits
from verify_service.cache.pools import allocate_pools
from verify_service.core.target_spec import TargetSpec
from verify_service.gpu.memory import step_size
from verify_service.model.loading import model_class, read_target
from verify_service.model.spec import text_config

PRODUCT_CODE = 100 << 20  # what oneDNN keeps for products of all usual numbers of rows (docs/decisions/0015)


def plan(config: VerifyConfig) -> dict[str, int]:
    """Bytes by what holds them. Raises a DraftwoodError for a model that cannot be served."""
    device = pick_device(config)
    dtype = pick_dtype(config, device)
    full, spec = read_target(resolve(config.target, setting="target"), allow_unsafe=config.allow_hybrid_unsafe)
    text, max_context = text_config(full), longest_context(config, spec)
    feature_size = 0 if config.draft == "none" else _feature_size(resolve(config.draft, setting="draft"))
    pools = allocate_pools(spec, *cache_sizes(config, max_context), feature_size, dtype, META)
    sizes = {"weights": _weights(text, spec, dtype), **pools.sizes()}
    if device.type == "cuda":
        return sizes | {"a step's working memory": step_size(spec, pass_limits(config), dtype)}
    num_heads = getattr(text, "num_attention_heads", 0)
    return sizes | {
        "a step's working memory": _step(config, spec, num_heads, max_context, dtype.itemsize),
        "libraries": resident_memory_bytes() + PRODUCT_CODE,
    }


def _feature_size(directory: Path) -> int:
    size = read_config(directory).get("hidden_size")
    if not isinstance(size, int) or size < 1:
        raise UnsupportedModelError(f"hidden_size in {directory / 'config.json'} is {size!r}", field="hidden_size")
    return size


def _weights(text: Any, spec: TargetSpec, dtype: torch.dtype) -> int:
    """All parameters, and the head once more where it is the embedding: products want it in another order."""
    with META:
        model = model_class(spec)._from_config(text, dtype=dtype)
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    return sum(p.nbytes for p in model.parameters()) + (model.lm_head.weight.nbytes if tied else 0)


def _step(config: VerifyConfig, spec: TargetSpec, num_heads: int, max_context: int, itemsize: int) -> int:
    """The largest tensors that live at once in a step of full trees at full length: one attention layer's gathered
    prefix and its scores, and the logits."""
    rows = config.max_batch * (config.max_tree_budget + 1)
    prefix = 2 * config.max_batch * max_context * spec.num_kv_heads * spec.head_dim * itemsize
    scores = 2 * 4 * rows * num_heads * max_context
    return (prefix + scores if spec.num_attention_layers else 0) + 2 * 4 * rows * spec.vocab_size


if __name__ == "__main__":
    sys.exit(print_plan(plan, VerifyConfig, prog="draftwood verify"))

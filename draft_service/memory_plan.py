"""What the draft service will hold in memory, without loading weights.

`python -m draft_service.memory_plan FLAGS` prints JSON. Sizes come from the code that allocates, run on
torch's meta device.
"""

from __future__ import annotations

import math
import sys

import torch

from draft_service.build import longest_context
from draft_service.cache.context_cache import ContextCache
from draft_service.draft.drafter import SLOTS_PER_PLACE
from draft_service.model.config import DrafterConfig, read_drafter_config
from draft_service.model.tensors import PROJECTION, expected_shapes
from draftwood.checkpoint import resolve
from draftwood.config import DraftConfig
from draftwood.device.placement import pick_device, pick_dtype
from draftwood.memory import print_plan, resident_memory_bytes


def plan(config: DraftConfig) -> dict[str, int]:
    """Bytes by what holds them. Raises a DraftwoodError for a model that cannot be served."""
    dtype = pick_dtype(config, pick_device(config))
    model = read_drafter_config(resolve(config.draft, setting="draft"))
    model = model.with_block_size(config.block_size).with_window(config.draft_window)
    cache = ContextCache(
        model,
        num_slots=SLOTS_PER_PLACE * config.max_batch,
        max_context=longest_context(config, model),
        dtype=dtype,
        device=torch.device("meta"),
    )
    logits = 2 * 4 * config.max_batch * model.block_size * model.vocab_size
    return {
        "weights": _weights(model, dtype.itemsize),
        "context cache": cache.keys.nbytes + cache.values.nbytes,
        "a step's working memory": logits,
        "libraries": resident_memory_bytes(),
    }


def _weights(model: DrafterConfig, itemsize: int) -> int:
    """The draft model's layers, their key and value projections once more as the one product that context rows take,
    the target's head, and its embedding as stored, which is two bytes a value in published checkpoints."""
    shapes = {name: math.prod(shape) for name, shape in expected_shapes(model).items() if name not in PROJECTION}
    context = sum(size for name, size in shapes.items() if name.endswith(("k_proj.weight", "v_proj.weight")))
    table = model.vocab_size * model.hidden_size
    return (sum(shapes.values()) + context + table) * itemsize + 2 * table


if __name__ == "__main__":
    sys.exit(print_plan(plan, DraftConfig, prog="draftwood draft"))

"""What a step over static buffers holds on the device, and what a start says when that is more than there is."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from draftwood.device.graphs import bucket
from draftwood.errors import ConfigError
from verify_service.cache.commit_inputs import Arena
from verify_service.core.target_spec import TargetSpec

NODES = (1, 8, 16, 32, 64, 128, 256)  # of a tree, spare ones included
PROMPT_NODES = (16, 64, 256)
META = torch.device("meta")


def node_bucket(num_nodes: int, sizes: tuple[int, ...] = NODES) -> int:
    """The least size that holds so many."""
    return next(size for size in sizes if size >= num_nodes)


def drawn_nodes(max_batch: int, max_nodes: int) -> int:
    """Nodes of all rows together that a step has logits for, at most."""
    return max(bucket(max_batch) * node_bucket(max_nodes), NODES[-1])


def passed_nodes(max_batch: int, max_nodes: int, prefill_tokens: int) -> int:
    """Nodes of all rows together in one pass, at most."""
    prompts = max(bucket(max_batch) * PROMPT_NODES[0], prefill_tokens)
    return max(drawn_nodes(max_batch, max_nodes), prompts)


def step_size(spec: TargetSpec, *, max_batch: int, max_nodes: int, prefill_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the commit inputs, hidden states and logits."""
    num_nodes = passed_nodes(max_batch, max_nodes, prefill_tokens)
    arena = Arena(spec, num_nodes, dtype=dtype, device=META)
    numbers = num_nodes * spec.hidden_size + drawn_nodes(max_batch, max_nodes) * spec.vocab_size
    return arena.nbytes + numbers * dtype.itemsize


def too_large(sizes: Mapping[str, int]) -> ConfigError:
    """What to say when an allocation failed, given bytes by what holds them."""
    parts = ", ".join(f"{what} {size / 2**30:.1f} GiB" for what, size in sizes.items() if size)
    return ConfigError(
        f"this GPU's memory does not hold what is asked for ({parts}); lower --max-batch, --max-context, "
        "--cache-tokens or --max-tree-budget",
        field="max_batch",
    )

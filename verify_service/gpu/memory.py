"""What a step over static buffers holds on the device, and what a start says when that is more than there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from draftwood.device.graphs import bucket
from draftwood.errors import ConfigError
from verify_service.cache.commit_inputs import Arena
from verify_service.core.target_spec import TargetSpec

NODES = (1, 8, 16, 32, 64, 128, 256)  # of a tree, spare ones included
PROMPT_NODES = (16, 64, 256)


def node_bucket(num_nodes: int, sizes: tuple[int, ...] = NODES) -> int:
    """The least size that holds so many."""
    return next(size for size in sizes if size >= num_nodes)


@dataclass(frozen=True, slots=True)
class PassLimits:
    """How large passes become at most."""

    max_batch: int
    max_nodes: int  # of a tree
    prefill_tokens: int  # of one pass over prompts

    @property
    def drawn_nodes(self) -> int:
        """Nodes of all rows together that a step has logits for."""
        return max(bucket(self.max_batch) * node_bucket(self.max_nodes), NODES[-1])

    @property
    def passed_nodes(self) -> int:
        """Nodes of all rows together in one pass."""
        return max(self.drawn_nodes, bucket(self.max_batch) * PROMPT_NODES[0], self.prefill_tokens)


def step_size(spec: TargetSpec, limits: PassLimits, dtype: torch.dtype) -> int:
    """Bytes of the commit inputs, hidden states and logits."""
    arena = Arena(spec, limits.passed_nodes, dtype=dtype, device=torch.device("meta"))
    numbers = limits.passed_nodes * spec.hidden_size + limits.drawn_nodes * spec.vocab_size
    return arena.nbytes + numbers * dtype.itemsize


def too_large(sizes: Mapping[str, int]) -> ConfigError:
    """What to say when an allocation failed, given bytes by what holds them."""
    parts = ", ".join(f"{what} {size / 2**30:.1f} GiB" for what, size in sizes.items() if size)
    return ConfigError(
        f"this GPU's memory does not hold what is asked for ({parts}); lower --max-batch, --max-context, "
        "--cache-tokens or --max-tree-budget",
        field="max_batch",
    )

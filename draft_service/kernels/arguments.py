"""What the kernels of trees are given and what they write, as groups of tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TreeSettings:
    """What the trees of S sequences depend on besides their logits."""

    seeds: Tensor  # [S] int64, the bits of the unsigned seed
    temperature: Tensor  # [S] float32; 0 ranks without noise
    base_lengths: Tensor  # [S] int32, position of the root: depth d is for the position d behind it
    roots: Tensor  # [S] int32, tokens
    budgets: Tensor  # [S] int32, nodes without the root
    widths: Tensor  # [S] int32, candidates per depth
    spines: Tensor  # [S] int32, not 0: the chain of first candidates goes in first


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest tokens of each depth, by descending score."""

    token_ids: Tensor  # [S, depths, width] int32
    scores: Tensor  # [S, depths, width] float32, by which nodes are picked
    log_probs: Tensor  # [S, depths, width] float32, the drafter's own


@dataclass(frozen=True, slots=True)
class TreeNodes:
    """Trees of at most N nodes, the root first and spare nodes last: token 0, parent -1, depth and log-prob 0."""

    token_ids: Tensor  # [S, N] int32
    parents: Tensor  # [S, N] int32
    depths: Tensor  # [S, N] int32
    log_probs: Tensor  # [S, N] float32
    num_nodes: Tensor  # [S] int32

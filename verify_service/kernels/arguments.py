"""What kernels are given and what they write, as groups of tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from verify_service.core.accept import Finish

NODES_PER_WORD = 64  # of an ancestor bitset
MAX_STOP_IDS = 16
FINISHES = (None, Finish.STOP, Finish.LENGTH)  # by their numbers in an outcome
NO_DRAW = len(FINISHES)  # the number of a walk that came to a node whose logits are no distribution


@dataclass(frozen=True, slots=True)
class TreeMetadata:
    """What the kernels of one pass share: B sequences with N nodes each, W words of NODES_PER_WORD nodes."""

    parents: Tensor  # [B, N] int32, -1 for the root and spare nodes
    num_nodes: Tensor  # [B] int32, 0 for a spare row
    base_lengths: Tensor  # [B] int32
    state_slots: Tensor  # [B] int32
    page_table: Tensor  # [B, P] int32
    positions: Tensor  # [B, N] int64
    ancestors: Tensor  # [B, N, W] int64, bit j % 64 of word j // 64: j is i or its ancestor
    depths: Tensor  # [B, N] int32
    tree_depth: Tensor  # [B] int32
    block_depth: Tensor  # [B, W] int32


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an accept walk decides, in the graph or by the host; a row with path_length 0 commits nothing."""

    path: Tensor  # [B, D_path] int32, nodes, root first
    path_length: Tensor  # [B] int32
    tokens: Tensor  # [B, D_path] int32, drawn tokens; the last one is the bonus token
    finish: Tensor  # [B] int32: 0 none, 1 stop, 2 length, 3 no draw


@dataclass(frozen=True, slots=True)
class Draws:
    """Settings of the draws and of the walk, a row each."""

    temperature: Tensor  # [B] float32; 0: greedy
    top_k: Tensor  # [B] int32; 0: no filter
    top_p: Tensor  # [B] float64
    min_p: Tensor  # [B] float64
    seeds: Tensor  # [B] int64, the bits of the unsigned seed
    stop_ids: Tensor  # [B, MAX_STOP_IDS] int32, -1 for padding
    remaining: Tensor  # [B] int32, tokens that may still be generated

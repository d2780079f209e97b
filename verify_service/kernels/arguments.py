"""What kernels are given and what they write, as groups of tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from verify_service.core.accept import Finish

NODES_PER_WORD = 64  # of an ancestor bitset
MAX_STOP_IDS = 16
FINISHES = (None, Finish.STOP, Finish.LENGTH)  # by their numbers in an outcome
NO_DRAW = len(FINISHES)  # the number of a walk that came to a node whose logits are no distribution


@dataclass(frozen=True, slots=True)
class TreeMetadata:
    """What the kernels of one pass share: B sequences with N nodes each, W words of NODES_PER_WORD nodes.

    The first five are the host's, the rest is written by `tree_metadata`.
    """

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
    finish: Tensor  # [B] int32: an index of FINISHES, or NO_DRAW


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """Settings of the draws and of the walk, by row of the batch. Neutral values as in SamplingParams."""

    temperature: Tensor  # [B] float32; 0: greedy
    top_k: Tensor  # [B] int32; 0: no filter
    top_p: Tensor  # [B] float64
    min_p: Tensor  # [B] float64
    seeds: Tensor  # [B] int64, the bits of the unsigned seed
    stop_ids: Tensor  # [B, at most MAX_STOP_IDS] int32, -1 for padding
    remaining: Tensor  # [B] int32, tokens that may still be generated, at least 1


@dataclass(frozen=True, slots=True)
class LayerCommitInputs:
    """What one recurrent layer leaves for the commit: a layer of CommitInputs."""

    inputs: Tensor  # [B, N, C], before the convolution
    conv: Tensor  # [B, N, C], after it: q | k | v of Gated DeltaNet, x | B | C of Mamba2
    norms: Tensor | None  # [B, N, 2 HK] float32: 1 / |q|, 1 / |k| of Gated DeltaNet; others have none
    g: Tensor  # [B, N, HV] float32, log decay, at most 0
    beta: Tensor  # [B, N, HV] float32: beta of Gated DeltaNet, time step of Mamba2


@dataclass(frozen=True, slots=True)
class Convolution:
    """A layer's causal convolution, one filter per channel."""

    weight: Tensor  # [kernel_size, C] float32, the newest last
    bias: Tensor | None = None  # [C] float32
    silu: bool = True  # whether a SiLU follows


@dataclass(frozen=True, slots=True)
class Gates:
    """What a layer's `g` and `beta` are computed from. Mamba2 has no `write`; its beta is the time step."""

    step: Tensor  # [B, N, HV] a of Gated DeltaNet, dt of Mamba2; rows may be strided
    write: Tensor | None  # [B, N, HV] b of Gated DeltaNet
    decay: Tensor  # [HV] float32, -exp(A_log)
    dt_bias: Tensor  # [HV]
    limits: tuple[float, float] = (0.0, math.inf)  # of the time step


@dataclass(frozen=True, slots=True)
class GatedNorm:
    """The norm that a layer's outputs leave through: w rmsnorm(o) silu(z) of each head."""

    gate: Tensor  # [B, N, HV V] z; rows may be strided
    weight: Tensor  # [V]
    eps: float


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The norms of an attention layer's heads."""

    q_weight: Tensor  # [D] float32, the whole factor
    k_weight: Tensor  # [D] float32, the whole factor
    eps: float


@dataclass(frozen=True, slots=True)
class KvPages:
    """One attention layer's committed keys and values, in pages of `page_size` slots."""

    keys: Tensor  # [HKV, S, D]
    values: Tensor  # [HKV, S, D]
    page_size: int


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """What a layer's attention is told besides its keys."""

    scaling: float
    sliding_window: int | None = None  # position j is seen from position i if i - j < sliding_window
    soft_cap: float | None = None  # scores become cap * tanh(score / cap)
    sinks: Tensor | None = None  # [HQ] the score of one more key that everybody sees and that has no value

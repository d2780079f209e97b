"""Ancestor bitsets of tree nodes as the masks that the plain kernels take."""

from __future__ import annotations

import torch
from torch import Tensor

NODES_A_WORD = 64


def inclusive_of(ancestors: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[B, N, W] int64 bitsets as [B, N, N]: 1 where j is i or its ancestor."""
    nodes = torch.arange(ancestors.shape[1], device=ancestors.device)
    return ((ancestors[:, :, nodes // NODES_A_WORD] >> (nodes % NODES_A_WORD)) & 1).to(dtype)


def off_path_of(inclusive: Tensor) -> Tensor:
    """[B, N, N]: 0 where j is i or its ancestor, else -inf."""
    return torch.zeros_like(inclusive).masked_fill_(inclusive == 0, -torch.inf)

"""Ancestor bitsets of tree nodes as the masks that the plain kernels take."""

from __future__ import annotations

import torch
from torch import Tensor

from verify_service.kernels.arguments import NODES_PER_WORD


def ancestor_mask_of(ancestors: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[B, N, W] int64 bitsets as [B, N, N]: 1 where j is i or its ancestor."""
    nodes = torch.arange(ancestors.shape[1], device=ancestors.device)
    return ((ancestors[:, :, nodes // NODES_PER_WORD] >> (nodes % NODES_PER_WORD)) & 1).to(dtype)


def ancestor_bias_of(ancestor_mask: Tensor) -> Tensor:
    """[B, N, N]: 0 where j is i or its ancestor, else -inf."""
    return torch.zeros_like(ancestor_mask).masked_fill_(ancestor_mask == 0, -torch.inf)

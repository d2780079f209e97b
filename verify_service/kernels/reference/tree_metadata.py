"""What one step derives from its trees' parents, in plain PyTorch: depths, positions, ancestor bitsets and masks."""

from __future__ import annotations

import torch
from torch import Tensor

from verify_service.kernels.arguments import NODES_PER_WORD, TreeMetadata


def tree_metadata(tree: TreeMetadata) -> None:
    """A node sees what its parent sees, and itself."""
    (b, n), device = tree.parents.shape, tree.parents.device
    node, rows = torch.arange(n, device=device), torch.arange(b, device=device)
    has_parent = (tree.parents >= 0) & (tree.parents < node) & (node < tree.num_nodes[:, None])
    parents = torch.where(has_parent, tree.parents.long(), 0)
    seen = torch.eye(n, dtype=torch.bool, device=device).repeat(b, 1, 1)  # [B, N, N]: j is i or its ancestor
    for i in range(n):
        seen[:, i] |= seen[rows, parents[:, i]] & has_parent[:, i, None]
    for w in range(tree.ancestors.shape[2]):
        block = slice(NODES_PER_WORD * w, NODES_PER_WORD * (w + 1))
        tree.ancestors[:, :, w] = (seen[:, :, block].long() << (node[block] % NODES_PER_WORD)).sum(2)
        tree.block_depth[:, w] = (seen[:, block, block].sum(2) - 1).amax(1)
    depths = seen.sum(2) - 1
    tree.depths.copy_(depths)
    tree.positions.copy_(tree.base_lengths[:, None] + depths)
    tree.tree_depth.copy_(depths.amax(1))


def ancestor_masks(ancestors: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """[B, N, W] int64 bitsets as two of [B, N, N]: 1 where j is i or its ancestor, else 0; and 0 there, else -inf."""
    nodes = torch.arange(ancestors.shape[1], device=ancestors.device)
    mask = ((ancestors[:, :, nodes // NODES_PER_WORD] >> (nodes % NODES_PER_WORD)) & 1).to(dtype)
    return mask, torch.zeros_like(mask).masked_fill_(mask == 0, -torch.inf)

"""What one step derives from its trees' parents: depths, positions and ancestor bitsets, in plain PyTorch."""

from __future__ import annotations

import torch

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

"""What one step derives from its trees' parents: depths, positions and ancestor bitsets, once and not a layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.errors import UnsupportedModelError
from verify_service.kernels.arguments import NODES_PER_WORD

MOST_NODES = 256


@triton.jit
def _walk(
    parents, num_nodes, base_lengths, positions, ancestors, depths, tree_depth, block_depth,
    N: tl.constexpr, NP: tl.constexpr, W: tl.constexpr, WP: tl.constexpr,
):  # fmt: skip
    """Program (row of the batch): all nodes walk to the root at once, one parent an iteration."""
    b = tl.program_id(0)
    node = tl.arange(0, NP)
    word = tl.arange(0, WP)
    inside = node < N
    real = node < tl.load(num_nodes + b)
    bits = tl.zeros([NP, WP], tl.int64)
    depth = tl.zeros([NP], tl.int32)
    in_block = tl.zeros([NP], tl.int32)
    at = tl.where(inside, node, -1)
    while tl.max(at, 0) >= 0:
        bit = tl.full([NP, 1], 1, tl.int64) << (at % 64).to(tl.int64)[:, None]
        bits |= tl.where((at[:, None] >= 0) & ((at // 64)[:, None] == word[None, :]), bit, 0)
        # Only earlier nodes are parents, so that the walk ends whatever is in the buffer.
        parent = tl.load(parents + b * N + at, mask=(at >= 0) & real, other=-1)
        at = tl.where((parent >= 0) & (parent < at), parent, -1)
        depth += (at >= 0).to(tl.int32)
        in_block += ((at >= 0) & (at // 64 == node // 64)).to(tl.int32)
    base = tl.load(base_lengths + b)
    tl.store(positions + b * N + node, (base + depth).to(tl.int64), mask=inside)
    tl.store(depths + b * N + node, depth, mask=inside)
    at_word = ancestors + (b * N + node[:, None]) * W + word[None, :]
    tl.store(at_word, bits, mask=inside[:, None] & (word < W)[None, :])
    tl.store(tree_depth + b, tl.max(depth, 0))
    of_block = tl.max(tl.where((node // 64)[:, None] == word[None, :], in_block[:, None], 0), 0)
    tl.store(block_depth + b * W + word, of_block, mask=word < W)


def tree_metadata(
    parents: Tensor,  # [B, N] int32; -1: root and spare nodes
    num_nodes: Tensor,  # [B] int32
    base_lengths: Tensor,  # [B] int32, committed tokens: the root's position
    positions: Tensor,  # [B, N] int64, written
    ancestors: Tensor,  # [B, N, W] int64, written: bit j % 64 of word j // 64 says that j is i or its ancestor
    depths: Tensor,  # [B, N] int32, written
    tree_depth: Tensor,  # [B] int32, written: the deepest node's
    block_depth: Tensor,  # [B, W] int32, written: most proper ancestors of a node within its own block of 64
) -> None:
    """Derives a step's structure; nodes from num_nodes on see only themselves, at the root's position.

    Raises:
        UnsupportedModelError: more than 256 nodes.
    """
    b, n = parents.shape
    if n > MOST_NODES:
        raise UnsupportedModelError(f"{n} nodes: at most {MOST_NODES}", field="num_nodes")
    words = -(-n // NODES_PER_WORD)
    _walk[(b,)](
        parents, num_nodes, base_lengths, positions, ancestors, depths, tree_depth, block_depth,
        N=n, NP=triton.next_power_of_2(n), W=words, WP=triton.next_power_of_2(words), num_warps=1 if n <= 64 else 4,
    )  # fmt: skip


def tree_structure_plain(
    parents: Tensor,  # [B, N] int32
    num_nodes: Tensor,  # [B] int32
    base_lengths: Tensor,  # [B] int32
    positions: Tensor,  # [B, N] int64, written
    ancestors: Tensor,  # [B, N, W] int64, written
    depths: Tensor,  # [B, N] int32, written
    tree_depth: Tensor,  # [B] int32, written
    block_depth: Tensor,  # [B, W] int32, written
) -> None:
    """The same in plain PyTorch: a node's bitset is its parent's and its own bit."""
    b, n = parents.shape
    seen = torch.eye(n, dtype=torch.bool, device=parents.device).repeat(b, 1, 1)
    rows = torch.arange(b, device=parents.device)
    for i in range(n):
        parent = parents[:, i].long()
        attached = (parent >= 0) & (i < num_nodes)
        seen[:, i] |= seen[rows, parent.clamp(min=0)] & attached[:, None]
    node = torch.arange(n, device=parents.device)
    depth = seen.sum(2) - 1
    for w in range(ancestors.shape[2]):
        block = slice(NODES_PER_WORD * w, NODES_PER_WORD * (w + 1))
        ancestors[:, :, w] = (seen[:, :, block].long() << (node[block] % NODES_PER_WORD)).sum(2)
        block_depth[:, w] = (seen[:, block, block].sum(2) - 1).amax(1)
    depths.copy_(depth)
    positions.copy_(base_lengths[:, None] + depth)
    tree_depth.copy_(depth.amax(1))

"""What one step derives from its trees' parents: depths, positions and ancestor bitsets, once and not per layer."""

from __future__ import annotations

import triton
import triton.language as tl

from verify_service.kernels.arguments import NODES_PER_WORD, TreeMetadata
from verify_service.kernels.triton.launch import require

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


def tree_metadata(tree: TreeMetadata) -> None:
    b, n = tree.parents.shape
    require(n <= MOST_NODES, "num_nodes", f"{n} nodes: at most {MOST_NODES}")
    words = -(-n // NODES_PER_WORD)
    _walk[(b,)](
        tree.parents, tree.num_nodes, tree.base_lengths, tree.positions, tree.ancestors, tree.depths, tree.tree_depth,
        tree.block_depth, N=n, NP=triton.next_power_of_2(n), W=words, WP=triton.next_power_of_2(words),
        num_warps=1 if n <= 64 else 4,
    )  # fmt: skip

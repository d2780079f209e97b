"""Depths, positions and ancestor bitsets of trees, against walks to the root."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from benchmarks.kernels.trees import random_parents
from draftwood.errors import UnsupportedModelError
from tests.verify_service.oracles import path_to
from verify_service.kernels.triton.tree_metadata import tree_metadata, tree_structure_plain

BOTH = pytest.mark.parametrize("build_step_inputs", [tree_metadata, tree_structure_plain])


def bitset(nodes: list[int], words: int) -> list[int]:
    """Words of 64 bits, as signed integers."""
    values = [sum(1 << (j % 64) for j in nodes if j // 64 == w) for w in range(words)]
    return [value - (1 << 64) if value >> 63 else value for value in values]


def check(
    build_step_inputs: Callable[..., None], trees: list[list[int]], n: int, bases: list[int], device: torch.device
) -> None:
    """Derives the structure of `trees`, padded to n nodes, and compares it with each node's walk to the root."""
    b, words = len(trees), -(-n // 64)
    parents = torch.tensor([tree + [-1] * (n - len(tree)) for tree in trees], dtype=torch.int32, device=device)
    sizes = torch.tensor([len(tree) for tree in trees], dtype=torch.int32, device=device)
    lengths = torch.tensor(bases, dtype=torch.int32, device=device)
    positions = torch.full((b, n), -77, dtype=torch.int64, device=device)
    ancestors = torch.full((b, n, words), -77, dtype=torch.int64, device=device)
    depths = torch.full((b, n), -77, dtype=torch.int32, device=device)
    tree_depth = torch.full((b,), -77, dtype=torch.int32, device=device)
    block_depth = torch.full((b, words), -77, dtype=torch.int32, device=device)
    build_step_inputs(parents, sizes, lengths, positions, ancestors, depths, tree_depth, block_depth)
    for row, tree in enumerate(trees):
        paths = [path_to(tree, i) if i < len(tree) else [i] for i in range(n)]
        assert ancestors[row].tolist() == [bitset(path, words) for path in paths]
        assert depths[row].tolist() == [len(path) - 1 for path in paths]
        assert positions[row].tolist() == [bases[row] + len(path) - 1 for path in paths]
        assert int(tree_depth[row]) == max(len(path) - 1 for path in paths)
        inside = [sum(j // 64 == i // 64 for j in path) - 1 for i, path in enumerate(paths)]
        assert block_depth[row].tolist() == [max(inside[64 * w : 64 * w + 64]) for w in range(words)]


@BOTH
@pytest.mark.parametrize("n", [1, 8, 16, 33, 64, 70, 128, 256])
def test_random_trees(build_step_inputs: Callable[..., None], n: int, device: torch.device) -> None:
    rng = random.Random(n)
    trees = [random_parents(rng, size) for size in (n, max(n - 5, 1), 1)]
    check(build_step_inputs, trees, n, [0, 17, 4096], device)


@BOTH
@pytest.mark.parametrize("n", [1, 9, 256])
def test_chains_and_stars(build_step_inputs: Callable[..., None], n: int, device: torch.device) -> None:
    """The deepest trees, which prefill has, and the widest."""
    check(build_step_inputs, [list(range(-1, n - 1)), [-1] + [0] * (n - 1)], n, [3, 0], device)


@BOTH
def test_rows_without_nodes_are_harmless(build_step_inputs: Callable[..., None], device: torch.device) -> None:
    check(build_step_inputs, [[], [-1, 0, 0, 1]], 8, [0, 5], device)


def test_what_stands_beyond_the_tree_is_not_read(device: torch.device) -> None:
    """Spare nodes see only themselves, whatever their parents say."""
    parents = torch.tensor([[-1, 0, 1, 2, 3, 4, 90, -9]], dtype=torch.int32, device=device)
    ancestors = torch.zeros(1, 8, 1, dtype=torch.int64, device=device)
    depths = torch.zeros(1, 8, dtype=torch.int32, device=device)
    two, base, deepest, in_block = torch.tensor([[2], [7], [0], [0]], dtype=torch.int32, device=device)
    positions = torch.zeros(1, 8, dtype=torch.int64, device=device)
    tree_metadata(parents, two, base, positions, ancestors, depths, deepest, in_block.view(1, 1))
    assert ancestors.flatten().tolist() == [1, 3, 4, 8, 16, 32, 64, 128]
    assert positions.flatten().tolist() == [7, 8, 7, 7, 7, 7, 7, 7]
    assert int(deepest) == 1


def test_too_many_nodes_are_named(device: torch.device) -> None:
    nothing = torch.zeros(1, 257, dtype=torch.int32, device=device)
    with pytest.raises(UnsupportedModelError, match="257 nodes: at most 256"):
        tree_metadata(*[nothing] * 8)

"""Depths, positions and ancestor bitsets of trees, against walks to the root."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from benchmarks.kernels.trees import random_parents, underived_metadata
from draftwood.errors import UnsupportedModelError
from tests.verify_service.oracles import path_to
from verify_service.kernels.arguments import TreeMetadata
from verify_service.kernels.reference import tree_metadata as reference
from verify_service.kernels.triton.tree_metadata import tree_metadata

Derive = Callable[[TreeMetadata], None]
BOTH = pytest.mark.parametrize("derive", [tree_metadata, reference.tree_metadata], ids=["kernel", "twin"])


def bitset(nodes: list[int], words: int) -> list[int]:
    """Words of 64 bits, as signed integers."""
    values = [sum(1 << (j % 64) for j in nodes if j // 64 == w) for w in range(words)]
    return [value - (1 << 64) if value >> 63 else value for value in values]


def check(derive: Derive, trees: list[list[int]], n: int, bases: list[int], device: torch.device) -> None:
    """Derives the metadata of `trees`, padded to n nodes, and compares them with each node's walk to the root."""
    words, metadata = -(-n // 64), underived_metadata(trees, n, device, base_lengths=bases)
    derive(metadata)
    for row, tree in enumerate(trees):
        paths = [path_to(tree, i) if i < len(tree) else [i] for i in range(n)]
        assert metadata.ancestors[row].tolist() == [bitset(path, words) for path in paths]
        assert metadata.depths[row].tolist() == [len(path) - 1 for path in paths]
        assert metadata.positions[row].tolist() == [bases[row] + len(path) - 1 for path in paths]
        assert int(metadata.tree_depth[row]) == max(len(path) - 1 for path in paths)
        inside = [sum(j // 64 == i // 64 for j in path) - 1 for i, path in enumerate(paths)]
        assert metadata.block_depth[row].tolist() == [max(inside[64 * w : 64 * w + 64]) for w in range(words)]


@BOTH
@pytest.mark.parametrize("n", [1, 8, 16, 33, 64, 70, 128, 256])
def test_random_trees(derive: Derive, n: int, device: torch.device) -> None:
    rng = random.Random(n)
    trees = [random_parents(rng, size) for size in (n, max(n - 5, 1), 1)]
    check(derive, trees, n, [0, 17, 4096], device)


@BOTH
@pytest.mark.parametrize("n", [1, 9, 256])
def test_chains_and_stars(derive: Derive, n: int, device: torch.device) -> None:
    """The deepest trees, which prefill has, and the widest."""
    check(derive, [list(range(-1, n - 1)), [-1] + [0] * (n - 1)], n, [3, 0], device)


@BOTH
def test_rows_without_nodes_are_harmless(derive: Derive, device: torch.device) -> None:
    check(derive, [[], [-1, 0, 0, 1]], 8, [0, 5], device)


@BOTH
def test_what_stands_beyond_the_tree_is_not_read(derive: Derive, device: torch.device) -> None:
    """Spare nodes see only themselves, whatever their parents say."""
    metadata = underived_metadata([[-1, 0, 1, 2, 3, 4, 90, -9]], 8, device, base_lengths=[7])
    metadata.num_nodes.fill_(2)
    derive(metadata)
    assert metadata.ancestors.flatten().tolist() == [1, 3, 4, 8, 16, 32, 64, 128]
    assert metadata.positions.flatten().tolist() == [7, 8, 7, 7, 7, 7, 7, 7]
    assert int(metadata.tree_depth) == 1


def test_too_many_nodes_are_named(device: torch.device) -> None:
    with pytest.raises(UnsupportedModelError, match="257 nodes: at most 256"):
        tree_metadata(underived_metadata([[-1] * 257], 257, device))

"""Derivation of a step's inputs against brute force over random trees."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood.tree import DraftTree
from tests.verify_service.oracles import path_to
from verify_service.cpu.step_inputs import StepRow, build_step_inputs, fill_paths


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 20) -> DraftTree:
    """Chains and lone roots often enough: they have shortcuts."""
    num_nodes = draw(st.integers(1, max_nodes))
    chain = draw(st.booleans())
    parents = [i - 1 if chain else draw(st.integers(0, i - 1)) for i in range(1, num_nodes)]
    return DraftTree.from_nodes(7, list(range(10, 9 + num_nodes)), parents, [-1.0] * (num_nodes - 1))


def brute_force(tree: DraftTree, n: int, kernel_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Ancestor rows and convolution windows, node by node by walking up."""
    ancestor_mask, index = np.zeros((n, n), np.float32), np.zeros((n, kernel_size), np.int64)
    for i in range(n):
        path = path_to(tree.parents, i) if i < tree.num_nodes else [i]
        ancestor_mask[i, path] = 1.0
        if i < tree.num_nodes:
            rows = [*range(kernel_size - 1), *(kernel_size - 1 + j for j in path)]  # the window, then the path
            index[i] = rows[len(rows) - kernel_size :]
        else:
            index[i] = kernel_size - 1 + i
    return ancestor_mask, index


@given(trees(), st.integers(0, 9), st.integers(1, 5))
def test_fill_paths(tree: DraftTree, spare: int, kernel_size: int) -> None:
    n = tree.num_nodes + spare
    ancestor_mask, index = np.zeros((n, n), np.float32), np.full((n, kernel_size), -7, np.int64)
    fill_paths(tree.parents, ancestor_mask, index)
    wanted = brute_force(tree, n, kernel_size)
    np.testing.assert_array_equal(ancestor_mask, wanted[0])
    np.testing.assert_array_equal(index, wanted[1])


@given(st.lists(st.tuples(trees(), st.integers(0, 40)), min_size=1, max_size=4), st.integers(0, 30), st.integers(1, 4))
def test_derive(parts: list[tuple[DraftTree, int]], num_nodes: int, kernel_size: int) -> None:
    """Every field, padding included: it reads scratch rows."""
    order = np.random.default_rng(0).permutation(np.arange(1, 1000))
    rows = [StepRow(t, base, order[80 * i : 80 * i + base + 21], i + 3) for i, (t, base) in enumerate(parts)]
    inputs = build_step_inputs(rows, kernel_size=kernel_size, num_nodes=num_nodes)
    n = max(num_nodes, *(row.tree.num_nodes for row in rows), 2 if len(rows) > 1 else 1)
    n = n if n <= 2 else math.ceil(n / 4) * 4 if n <= 16 else math.ceil(n / 16) * 16
    assert inputs.input_ids.shape == inputs.positions.shape == (len(rows), n)
    assert inputs.state_slots.tolist() == [row.state_slot for row in rows]
    for b, row in enumerate(rows):
        tree, base, m = row.tree, row.base_length, row.tree.num_nodes
        assert inputs.input_ids[b, :m].tolist() == list(tree.token_ids)
        assert inputs.positions[b].tolist() == [base + d for d in (*tree.depths, *(0,) * (n - m))]
        assert inputs.prefix_slots[b, :base].tolist() == row.slots[:base].tolist()
        assert not inputs.prefix_slots[b, base:].any()
        assert (inputs.prefix_bias[b, :base] == 0).all()
        assert (inputs.prefix_bias[b, base:] == -torch.inf).all()
        ancestor_mask, index = brute_force(tree, n, kernel_size)
        assert inputs.ancestor_mask[b].numpy().tolist() == ancestor_mask.tolist()
        assert inputs.conv_index[b].numpy().tolist() == index.tolist()
    assert torch.equal(inputs.ancestor_bias == 0, inputs.ancestor_mask == 1)
    assert torch.equal(inputs.ancestor_bias == -torch.inf, inputs.ancestor_mask == 0)

"""The convolution along tree paths against a walk from each node, in float64; windows after a commit."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.trees import random_parents
from tests.verify_service.oracles import path_to, relative_error
from verify_service.kernels.reference.commit import commit_window
from verify_service.kernels.reference.conv_gate import conv_index, tree_conv


def plain_conv(inputs: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None, parents: Sequence[int]) -> Tensor:
    """[N, C] in float64: walk up from every node, then leftwards through the committed window."""
    kernel_size = weight.shape[0]
    out = torch.full(inputs.shape, torch.nan, dtype=torch.float64)
    for i in range(len(parents)):
        total = torch.zeros(inputs.shape[1], dtype=torch.float64)
        node, column = i, -1
        for tap in range(kernel_size - 1, -1, -1):
            if node >= 0:
                value, node = inputs[node], parents[node]
            else:
                value, column = window[column], column - 1
            total += weight[tap].double() * value.double()
        total += 0.0 if bias is None else bias.double()
        out[i] = total * total.sigmoid()
    return out


def walked_index(trees: Sequence[Sequence[int]], num_nodes: int, kernel_size: int) -> Tensor:
    """Rows of (window ++ inputs), oldest first, by the same walk."""
    index = torch.zeros(len(trees), num_nodes, kernel_size, dtype=torch.int64)
    for b, parents in enumerate(trees):
        for i, _ in enumerate(parents):
            node, row = i, kernel_size - 2
            for tap in range(kernel_size - 1, -1, -1):
                if node >= 0:
                    index[b, i, tap], node = kernel_size - 1 + node, parents[node]
                else:
                    index[b, i, tap], row = row, row - 1
    return index


@pytest.mark.parametrize("kernel_size", [2, 3, 4])
@pytest.mark.parametrize("with_bias", [False, True])
def test_tree_conv_follows_the_path_across_the_root(kernel_size: int, with_bias: bool) -> None:
    n, channels = 23, 10
    trees = [random_parents(random.Random(9), n), random_parents(random.Random(10), 11)]
    inputs, window = torch.randn(2, n, channels), torch.randn(2, kernel_size - 1, channels)
    weight, bias = torch.randn(kernel_size, channels), torch.randn(channels) if with_bias else None
    index = walked_index(trees, n, kernel_size)
    padded = [[*parents, *[-1] * (n - len(parents))] for parents in trees]
    for b, parents in enumerate(trees):
        assert torch.equal(conv_index(torch.tensor(padded), kernel_size)[b, : len(parents)], index[b, : len(parents)])
    out = tree_conv(inputs, window, index, weight, bias)
    for b, parents in enumerate(trees):
        wanted = plain_conv(inputs[b], window[b], weight, bias, parents)[: len(parents)]
        assert relative_error(out[b, : len(parents)], wanted) < 1e-6
        for node, _ in enumerate(parents):  # nodes off the path may hold anything: not one bit changes
            worse = torch.full_like(inputs, torch.nan)
            path = path_to(parents, node)
            worse[b, path] = inputs[b, path]
            assert torch.equal(tree_conv(worse, window, index, weight, bias)[b, node], out[b, node])


@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
def test_commit_window_keeps_the_newest(length: int) -> None:
    window, inputs = torch.randn(2, 3, 5), torch.randn(2, length, 5)
    wanted = torch.cat([window, inputs], 1)[:, -3:].clone()
    commit_window(window, inputs)
    assert torch.equal(window, wanted)

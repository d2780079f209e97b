"""Kernels against the formulas in float64, on odd shapes, and with what must not matter set to the worst."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.trees import random_parents
from tests.verify_service.oracles import (
    REGIMES,
    GdnInputs,
    gdn_paths,
    gdn_token,
    masks,
    path_to,
    relative_error,
)
from verify_service.kernels.reference.gdn_commit import gdn_commit_one
from verify_service.kernels.reference.gdn_verify import gdn_over_tree
from verify_service.kernels.reference.kv_commit import commit_rows
from verify_service.kernels.reference.tree_conv import commit_window, tree_conv

SIZES = (1, 2, 7, 40, 64)
HEADS = ((1, 1), (3, 9), (2, 4))  # key heads, value heads
TOLERANCE = 2e-6


def verify(x: GdnInputs, trees: Sequence[Sequence[int]]) -> Tensor:
    before = x.state.clone()
    out = gdn_over_tree(x.q, x.k, x.v, x.g, x.beta, x.state, *masks(trees, x.k.shape[1]))
    assert torch.equal(x.state, before)  # a verify pass changes no committed state
    return out


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("num_nodes", SIZES)
def test_gdn_verify_is_the_recurrence_along_every_path(regime: str, num_nodes: int) -> None:
    for seed, heads in enumerate(HEADS):
        rng = random.Random(num_nodes + seed)
        trees = [random_parents(rng, num_nodes) for _ in range(2)]
        x = GdnInputs.draw(seed, regime, 2, num_nodes, heads, (24, 20))
        assert relative_error(verify(x, trees), gdn_paths(x, trees)) < TOLERANCE


@pytest.mark.parametrize("regime", REGIMES)
def test_gdn_verify_at_served_head_sizes(regime: str) -> None:
    trees = [random_parents(random.Random(1), 64)]
    x = GdnInputs.draw(1, regime, 1, 64, (2, 4), (128, 128))
    assert relative_error(verify(x, trees), gdn_paths(x, trees)) < TOLERANCE


def test_gdn_verify_under_strong_decay() -> None:
    """Masked before the exponential: between siblings e^(G_i - G_j) has no bound."""
    trees = [random_parents(random.Random(2), 40)]
    x = GdnInputs.draw(2, "iid", 1, 40, (2, 4), (16, 16))
    x = replace(x, g=x.g * 60.0)
    out = verify(x, trees)
    assert torch.isfinite(out).all()
    assert relative_error(out, gdn_paths(x, trees)) < TOLERANCE


@pytest.mark.parametrize("regime", REGIMES)
def test_width_one_tree_is_a_chain(regime: str) -> None:
    """Outputs of a chain are those of the growing state that a commit leaves."""
    n = 16
    x = GdnInputs.draw(3, regime, 1, n, (3, 9), (16, 12))
    out = verify(x, [range(-1, n - 1)])
    state = x.state.clone()
    for i in range(n):
        gdn_commit_one(state, x.k[0, i][None], x.v[0, i][None], x.g[0, i][None], x.beta[0, i][None])
        query = x.q[0, i].repeat_interleave(3, 0) * 16**-0.5
        wanted = (state[0].double() @ query.double()[..., None])[..., 0]
        assert relative_error(out[0, i], wanted) < TOLERANCE


def adversaries(x: GdnInputs, kept: Sequence[int]) -> list[GdnInputs]:
    """The same nodes `kept`, all others replaced: antisymmetric, enormous, equal to a kept node, forgetting nothing."""
    others = [i for i in range(x.k.shape[1]) if i not in kept]
    changed: list[GdnInputs] = []
    for kind in range(4):
        y = GdnInputs(*(t.clone() for t in (x.q, x.k, x.v, x.g, x.beta, x.state)))
        if kind == 0:
            y.k[:, others] *= -1
            y.v[:, others] *= -1
        elif kind == 1:
            y.v[:, others] *= 1e6
        elif kind == 2:
            y.k[:, others] = x.k[:, kept[-1] : kept[-1] + 1]
            y.v[:, others] = -x.v[:, kept[-1] : kept[-1] + 1]
        else:
            y.g[:, others] = 0.0
            y.beta[:, others] = 1.0
        changed.append(y)
    return changed


@pytest.mark.parametrize("regime", REGIMES)
def test_siblings_do_not_change_an_output(regime: str) -> None:
    """Contract (b), with siblings that would cancel or drown what leaks; and each path alone as a chain."""
    parents = random_parents(random.Random(5), 24)
    x = GdnInputs.draw(5, regime, 1, 24, (2, 6), (16, 16))
    out = verify(x, [parents])
    for node in range(24):
        path = path_to(parents, node)
        alone = verify(x.pick(0, path), [range(-1, len(path) - 1)])
        assert relative_error(alone[0, -1], out[0, node].double()) < 1e-6
        for y in adversaries(x, path):
            assert relative_error(verify(y, [parents])[0, node], out[0, node].double()) < 1e-6


def test_antisymmetric_siblings_do_not_cancel() -> None:
    """Two siblings with opposite keys and values write the same thing: a mask that lets both through is off by two."""
    parents = [-1, 0, 0, 1, 2]
    x = GdnInputs.draw(6, "iid", 1, 5, (1, 1), (8, 8))
    x.k[:, 2], x.v[:, 2] = -x.k[:, 1], -x.v[:, 1]
    x.k[:, 4], x.v[:, 4], x.q[:, 4] = x.k[:, 3], x.v[:, 3], x.q[:, 3]
    for t in (x.g, x.beta):
        t[:, 2], t[:, 4] = t[:, 1], t[:, 3]
    out = verify(x, [parents])
    assert relative_error(out, gdn_paths(x, [parents])) < TOLERANCE
    assert relative_error(out[0, 4], out[0, 3].double()) < 1e-6


def test_padding_nodes_change_nothing() -> None:
    """A short tree in a batch with a longer one: what the spare nodes hold is never seen."""
    parents = random_parents(random.Random(7), 9)
    x = GdnInputs.draw(7, "silu", 1, 20, (2, 4), (16, 16))
    short = verify(x.pick(0, range(9)), [parents])
    x.v[:, 9:], x.k[:, 9:] = 1e6, -1.0
    assert relative_error(verify(x, [parents])[:, :9], short.double()) < 1e-6


@pytest.mark.parametrize("heads", HEADS)
def test_gdn_commit_is_the_recurrence(heads: tuple[int, int]) -> None:
    layers, n = 3, 12
    x = GdnInputs.draw(8, "silu", layers, n, heads, (16, 12))  # a batch row stands for a layer
    state = x.state.clone()
    for i in range(n):
        gdn_commit_one(state, x.k[:, i], x.v[:, i], x.g[:, i], x.beta[:, i])
    for layer in range(layers):
        wanted = x.state[layer].double()
        for i in range(n):
            wanted = gdn_token(wanted, *(t[layer, i].double() for t in (x.k, x.v, x.g, x.beta)))
        assert relative_error(state[layer], wanted) < TOLERANCE


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


def conv_index(trees: Sequence[Sequence[int]], num_nodes: int, kernel_size: int) -> Tensor:
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
    index = conv_index(trees, n, kernel_size)
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


@pytest.mark.parametrize("path", [[0], [0, 1, 2], [0, 2, 3, 7], [0, 5], [0, 1, 4, 5, 6]])
def test_kv_commit_moves_the_path_and_nothing_else(path: list[int]) -> None:
    pool, nodes = torch.randn(2, 3, 40, 5), torch.randn(2, 3, 8, 5)
    slots, before = torch.randperm(40)[: len(path)], pool.clone()
    commit_rows(pool, nodes, torch.tensor(path), slots)
    for i, node in enumerate(path):
        assert torch.equal(pool[:, :, slots[i]], nodes[:, :, node])
    untouched = torch.ones(40, dtype=torch.bool)
    untouched[slots] = False
    assert torch.equal(pool[:, :, untouched], before[:, :, untouched])

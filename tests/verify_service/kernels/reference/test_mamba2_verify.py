"""Mamba2's kernels against one state a node in float64, on odd shapes, what must not matter set to the worst."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.trees import random_parents
from tests.verify_service.oracles import (
    REGIMES,
    Mamba2Inputs,
    mamba2_paths,
    mamba2_token,
    masks,
    path_to,
    relative_error,
)
from verify_service.kernels.reference.mamba2_commit import mamba2_commit_one
from verify_service.kernels.reference.mamba2_verify import mamba2_over_tree

SIZES = (1, 2, 7, 40, 64)
HEADS = ((1, 1), (3, 9), (2, 4))  # groups, heads
TOLERANCE = 2e-6


def verify(x: Mamba2Inputs, trees: Sequence[Sequence[int]]) -> Tensor:
    before = x.state.clone()
    out = mamba2_over_tree(x.c, x.b, x.x, x.g, x.dt, x.state, *masks(trees, x.b.shape[1]))
    assert torch.equal(x.state, before)  # a verify pass changes no committed state
    return out


def commit(state: Tensor, x: Mamba2Inputs, row: int, node: int) -> None:
    mamba2_commit_one(state, *(t[row, node][None] for t in (x.b, x.x, x.g, x.dt)))


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("num_nodes", SIZES)
def test_verify_is_the_recurrence_along_every_path(regime: str, num_nodes: int) -> None:
    for seed, heads in enumerate(HEADS):
        rng = random.Random(num_nodes + seed)
        trees = [random_parents(rng, num_nodes) for _ in range(2)]
        x = Mamba2Inputs.draw(seed, regime, 2, num_nodes, heads, (24, 20))
        assert relative_error(verify(x, trees), mamba2_paths(x, trees)) < TOLERANCE


@pytest.mark.parametrize("regime", REGIMES)
def test_verify_at_served_head_sizes(regime: str) -> None:
    trees = [random_parents(random.Random(1), 64)]
    x = Mamba2Inputs.draw(1, regime, 1, 64, (2, 8), (128, 64))
    assert relative_error(verify(x, trees), mamba2_paths(x, trees)) < TOLERANCE


def test_what_follows_a_token_that_forgets_everything_is_exact() -> None:
    """The root's decay of e^-20000 leaves sums in which a weak one of e^-0.01 would be lost."""
    n = 40
    x = Mamba2Inputs.draw(2, "iid", 1, n, (2, 4), (16, 16))
    x = replace(x, g=x.g * 1e-2)
    x.g[:, 0] = -2e4
    for parents in (list(range(-1, n - 1)), random_parents(random.Random(2), n)):
        out = verify(x, [parents])
        assert torch.isfinite(out).all()
        assert relative_error(out, mamba2_paths(x, [parents])) < TOLERANCE


@pytest.mark.parametrize("regime", REGIMES)
def test_width_one_tree_is_a_chain(regime: str) -> None:
    """Outputs of a chain are those of the growing state that a commit leaves."""
    n = 16
    x = Mamba2Inputs.draw(3, regime, 1, n, (3, 9), (16, 12))
    out = verify(x, [range(-1, n - 1)])
    state = x.state.clone()
    for i in range(n):
        commit(state, x, 0, i)
        query = x.c[0, i].repeat_interleave(3, 0)
        wanted = (state[0].double() @ query.double()[..., None])[..., 0]
        assert relative_error(out[0, i], wanted) < TOLERANCE


def adversaries(x: Mamba2Inputs, kept: Sequence[int]) -> list[Mamba2Inputs]:
    """The same nodes `kept`, all others replaced: antisymmetric, enormous, equal to a kept node, forgetting nothing."""
    others = [i for i in range(x.b.shape[1]) if i not in kept]
    changed: list[Mamba2Inputs] = []
    for kind in range(4):
        y = Mamba2Inputs(*(getattr(x, spec.name).clone() for spec in fields(x)))
        if kind == 0:
            y.x[:, others] *= -1
        elif kind == 1:
            y.x[:, others] *= 1e6
        elif kind == 2:
            y.b[:, others] = x.b[:, kept[-1] : kept[-1] + 1]
            y.x[:, others] = -x.x[:, kept[-1] : kept[-1] + 1]
        else:
            y.g[:, others], y.dt[:, others] = 0.0, 30.0
        changed.append(y)
    return changed


@pytest.mark.parametrize("regime", REGIMES)
def test_siblings_do_not_change_an_output(regime: str) -> None:
    """Contract (b), with siblings that would cancel or drown what leaks; and each path alone as a chain."""
    parents = random_parents(random.Random(5), 24)
    x = Mamba2Inputs.draw(5, regime, 1, 24, (2, 6), (16, 16))
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
    x = Mamba2Inputs.draw(6, "iid", 1, 5, (1, 1), (8, 8))
    x.b[:, 2], x.x[:, 2] = -x.b[:, 1], -x.x[:, 1]
    for t in (x.b, x.x, x.c):
        t[:, 4] = t[:, 3]
    for t in (x.g, x.dt):
        t[:, 2], t[:, 4] = t[:, 1], t[:, 3]
    out = verify(x, [parents])
    assert relative_error(out, mamba2_paths(x, [parents])) < TOLERANCE
    assert relative_error(out[0, 4], out[0, 3].double()) < 1e-6


def test_padding_nodes_change_nothing() -> None:
    """A short tree in a batch with a longer one: what the spare nodes hold is never seen."""
    parents = random_parents(random.Random(7), 9)
    x = Mamba2Inputs.draw(7, "silu", 1, 20, (2, 4), (16, 16))
    short = verify(x.pick(0, range(9)), [parents])
    x.x[:, 9:], x.b[:, 9:] = 1e6, -1.0
    assert relative_error(verify(x, [parents])[:, :9], short.double()) < 1e-6


@pytest.mark.parametrize("heads", HEADS)
def test_commit_is_the_recurrence(heads: tuple[int, int]) -> None:
    layers, n = 3, 12
    x = Mamba2Inputs.draw(8, "silu", layers, n, heads, (16, 12))  # a batch row stands for a layer
    state = x.state.clone()
    for i in range(n):
        mamba2_commit_one(state, x.b[:, i], x.x[:, i], x.g[:, i], x.dt[:, i])
    for layer in range(layers):
        wanted = x.state[layer].double()
        for i in range(n):
            wanted = mamba2_token(wanted, *(t[layer, i].double() for t in (x.b, x.x, x.g, x.dt)))
        assert relative_error(state[layer], wanted) < TOLERANCE

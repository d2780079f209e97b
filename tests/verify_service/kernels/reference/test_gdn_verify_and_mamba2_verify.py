"""Gated DeltaNet and Mamba2 against the recurrence along every path in float64, on odd shapes, and with what must not
matter set to the worst."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.trees import random_parents
from tests.verify_service.oracles import (
    REGIMES,
    RecurrentInputs,
    draw_gdn,
    draw_mamba2,
    gdn_token,
    mamba2_token,
    masks,
    path_to,
    paths,
    relative_error,
)
from verify_service.kernels.reference.commit import commit_one
from verify_service.kernels.reference.gdn_verify import gdn_over_tree
from verify_service.kernels.reference.mamba2_verify import mamba2_over_tree

SIZES = (1, 2, 7, 40, 64)
HEADS = ((1, 1), (3, 9), (2, 4))  # HK, HV
TOLERANCE = 2e-6


@dataclass(frozen=True)
class Recurrence:
    """A kind of layer: its kernels, and the token that they are compared with."""

    draw: Callable[..., RecurrentInputs]
    over_tree: Callable[..., Tensor]
    commit_one: Callable[..., None]
    token: Callable[..., Tensor]
    is_scaled: bool  # queries by K^-0.5
    most_beta: float
    served: tuple[tuple[int, int], tuple[int, int]]  # HK, HV and K, V

    def verify(self, x: RecurrentInputs, trees: Sequence[Sequence[int]]) -> Tensor:
        before = x.state.clone()
        out = self.over_tree(x.q, x.k, x.v, x.g, x.beta, x.state, *masks(trees, x.k.shape[1]))
        assert torch.equal(x.state, before)  # a verify pass changes no committed state
        return out

    def scale(self, x: RecurrentInputs) -> float:
        return x.k.shape[3] ** -0.5 if self.is_scaled else 1.0

    def check(self, x: RecurrentInputs, trees: Sequence[Sequence[int]]) -> Tensor:
        """The outputs, which are those of the recurrence along every path."""
        out = self.verify(x, trees)
        assert torch.isfinite(out).all()
        assert relative_error(out, paths(x, trees, self.token, self.scale(x))) < TOLERANCE
        return out


_GDN_ONE, _MAMBA2_ONE = (partial(commit_one, is_delta=is_delta) for is_delta in (True, False))
GDN = Recurrence(draw_gdn, gdn_over_tree, _GDN_ONE, gdn_token, True, 1.0, ((2, 4), (128, 128)))
MAMBA2 = Recurrence(draw_mamba2, mamba2_over_tree, _MAMBA2_ONE, mamba2_token, False, 30.0, ((2, 8), (128, 64)))
BOTH = pytest.mark.parametrize("kind", [GDN, MAMBA2], ids=["gated delta net", "mamba2"])


@BOTH
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("num_nodes", SIZES)
def test_verify_is_the_recurrence_along_every_path(kind: Recurrence, regime: str, num_nodes: int) -> None:
    for seed, heads in enumerate(HEADS):
        rng = random.Random(num_nodes + seed)
        trees = [random_parents(rng, num_nodes) for _ in range(2)]
        kind.check(kind.draw(seed, regime, 2, num_nodes, heads, (24, 20)), trees)


@BOTH
@pytest.mark.parametrize("regime", REGIMES)
def test_verify_at_served_head_sizes(kind: Recurrence, regime: str) -> None:
    kind.check(kind.draw(1, regime, 1, 64, *kind.served), [random_parents(random.Random(1), 64)])


def test_strong_decay_of_gated_delta_net() -> None:
    """Masked before the exponential: between siblings e^(G_i - G_j) has no bound."""
    x = draw_gdn(2, "iid", 1, 40, (2, 4), (16, 16))
    GDN.check(replace(x, g=x.g * 60.0), [random_parents(random.Random(2), 40)])


def test_what_follows_a_token_that_forgets_everything_is_exact_in_mamba2() -> None:
    """The root's decay of e^-20000 leaves sums in which a weak one of e^-0.01 would be lost."""
    n = 40
    x = draw_mamba2(2, "iid", 1, n, (2, 4), (16, 16))
    x = replace(x, g=x.g * 1e-2)
    x.g[:, 0] = -2e4
    for parents in (list(range(-1, n - 1)), random_parents(random.Random(2), n)):
        MAMBA2.check(x, [parents])


@BOTH
@pytest.mark.parametrize("regime", REGIMES)
def test_width_one_tree_is_a_chain(kind: Recurrence, regime: str) -> None:
    """Outputs of a chain are those of the growing state that a commit leaves."""
    n = 16
    x = kind.draw(3, regime, 1, n, (3, 9), (16, 12))
    out = kind.verify(x, [range(-1, n - 1)])
    state = x.state.clone()
    for i in range(n):
        kind.commit_one(state, *(t[0, i][None] for t in (x.k, x.v, x.g, x.beta)))
        query = x.q[0, i].repeat_interleave(3, 0) * kind.scale(x)
        wanted = (state[0].double() @ query.double()[..., None])[..., 0]
        assert relative_error(out[0, i], wanted) < TOLERANCE


def adversaries(kind: Recurrence, x: RecurrentInputs, kept: Sequence[int]) -> list[RecurrentInputs]:
    """The same nodes `kept`, all others replaced: antisymmetric, opposed, enormous, equal to a kept node, forgetting
    nothing."""
    others = [i for i in range(x.k.shape[1]) if i not in kept]
    changed = [RecurrentInputs(*(getattr(x, spec.name).clone() for spec in fields(x))) for _ in range(5)]
    antisymmetric, opposed, enormous, equal, lasting = changed
    antisymmetric.k[:, others] *= -1
    antisymmetric.v[:, others] *= -1
    opposed.v[:, others] *= -1
    enormous.v[:, others] *= 1e6
    equal.k[:, others] = x.k[:, kept[-1] : kept[-1] + 1]
    equal.v[:, others] = -x.v[:, kept[-1] : kept[-1] + 1]
    lasting.g[:, others], lasting.beta[:, others] = 0.0, kind.most_beta
    return changed


@BOTH
@pytest.mark.parametrize("regime", REGIMES)
def test_siblings_do_not_change_an_output(kind: Recurrence, regime: str) -> None:
    """Contract (b), with siblings that would cancel or drown what leaks; and each path alone as a chain."""
    parents = random_parents(random.Random(5), 24)
    x = kind.draw(5, regime, 1, 24, (2, 6), (16, 16))
    out = kind.verify(x, [parents])
    for node in range(24):
        path = path_to(parents, node)
        alone = kind.verify(x.pick(0, path), [range(-1, len(path) - 1)])
        assert relative_error(alone[0, -1], out[0, node].double()) < 1e-6
        for y in adversaries(kind, x, path):
            assert relative_error(kind.verify(y, [parents])[0, node], out[0, node].double()) < 1e-6


@BOTH
def test_antisymmetric_siblings_do_not_cancel(kind: Recurrence) -> None:
    """Two siblings with opposite keys and values write the same thing: a mask that lets both through is off by two."""
    x = kind.draw(6, "iid", 1, 5, (1, 1), (8, 8))
    x.k[:, 2], x.v[:, 2] = -x.k[:, 1], -x.v[:, 1]
    for t in (x.k, x.v, x.q):
        t[:, 4] = t[:, 3]
    for t in (x.g, x.beta):
        t[:, 2], t[:, 4] = t[:, 1], t[:, 3]
    out = kind.check(x, [[-1, 0, 0, 1, 2]])
    assert relative_error(out[0, 4], out[0, 3].double()) < 1e-6


@BOTH
def test_padding_nodes_change_nothing(kind: Recurrence) -> None:
    """A short tree in a batch with a longer one: what the spare nodes hold is never seen."""
    parents = random_parents(random.Random(7), 9)
    x = kind.draw(7, "silu", 1, 20, (2, 4), (16, 16))
    short = kind.verify(x.pick(0, range(9)), [parents])
    x.v[:, 9:], x.k[:, 9:] = 1e6, -1.0
    assert relative_error(kind.verify(x, [parents])[:, :9], short.double()) < 1e-6


@BOTH
@pytest.mark.parametrize("heads", HEADS)
def test_commit_is_the_recurrence(kind: Recurrence, heads: tuple[int, int]) -> None:
    layers, n = 3, 12
    x = kind.draw(8, "silu", layers, n, heads, (16, 12))  # a batch row stands for a layer
    state = x.state.clone()
    for i in range(n):
        kind.commit_one(state, *(t[:, i] for t in (x.k, x.v, x.g, x.beta)))
    for layer in range(layers):
        wanted = x.state[layer].double()
        for i in range(n):
            wanted = kind.token(wanted, *(t[layer, i].double() for t in (x.k, x.v, x.g, x.beta)))
        assert relative_error(state[layer], wanted) < TOLERANCE

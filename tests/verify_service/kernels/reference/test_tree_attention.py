"""Tree attention against softmax over what a node may see, in float64: odd shapes, windows, soft caps and sinks."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.kernels.trees import random_parents
from tests.verify_service.oracles import masks, path_to, relative_error
from verify_service.cache.layer_views import AttentionView
from verify_service.cpu.layers import ATTENTION_NAME
from verify_service.cpu.step_inputs import StepInputs
from verify_service.kernels.reference.tree_attention import attention_over_tree

TOLERANCE = 2e-6


class Attention:
    """Random queries, keys and values of B trees over paged prefixes, and what each node may see."""

    def __init__(self, seed: int, heads: tuple[int, int], d: int, num_nodes: int, bases: Sequence[int]) -> None:
        generator = torch.Generator().manual_seed(seed)
        hkv, hq = heads
        self.b, self.n, self.bases = len(bases), num_nodes, bases
        self.trees = [random_parents(random.Random(seed + b), max(num_nodes - 3 * b, 1)) for b in range(self.b)]
        self.length = -(-(max(bases) + 1) // 8) * 8
        num_slots = self.b * self.length + 8
        self.query = torch.randn(self.b, hq, num_nodes, d, generator=generator)
        self.key = torch.randn(self.b, hkv, num_nodes, d, generator=generator)
        self.value = torch.randn(self.b, hkv, num_nodes, d, generator=generator)
        self.key_pool = torch.randn(hkv, num_slots, d, generator=generator)
        self.value_pool = torch.randn(hkv, num_slots, d, generator=generator)
        order = torch.randperm(num_slots - 1, generator=generator)[: self.b * self.length] + 1
        self.slots = order.view(self.b, self.length).clone()
        self.bias = torch.full((self.b, self.length), -torch.inf)
        self.positions = torch.zeros(self.b, num_nodes, dtype=torch.int64)
        for b, (base, parents) in enumerate(zip(bases, self.trees, strict=True)):
            self.slots[b, base:] = 0  # scratch
            self.bias[b, :base] = 0.0
            depths = [len(path_to(parents, i)) - 1 for i in range(len(parents))]
            self.positions[b] = base
            self.positions[b, : len(parents)] += torch.tensor(depths)

        self.soft_cap: float | None = None
        self.sinks: Tensor | None = None

    def with_extras(self, extras: str) -> Self:
        """The same with a soft cap that bends most scores, with sinks of very different size, or with both."""
        if "cap" in extras:
            self.soft_cap = 0.7
        if "sinks" in extras:
            self.sinks = torch.linspace(-4.0, 5.0, self.query.shape[1])
        return self

    def run(self, window: int | None = None) -> Tensor:
        _, ancestor_bias = masks(self.trees, self.n)
        scaling = self.query.shape[-1] ** -0.5
        return attention_over_tree(
            self.query,
            self.key,
            self.value,
            self.key_pool,
            self.value_pool,
            self.slots,
            self.bias,
            ancestor_bias,
            self.positions,
            scaling,
            window,
            self.soft_cap,
            self.sinks,
        )

    def seen(self, b: int, node: int, window: int | None) -> tuple[list[int], list[int]]:
        """Prefix positions and nodes that a node attends to."""
        path = path_to(self.trees[b], node)
        position = self.bases[b] + len(path) - 1
        near = window if window is not None else 10**9
        prefix = [p for p in range(self.bases[b]) if position - p < near]
        return prefix, [j for i, j in enumerate(path) if len(path) - 1 - i < near]

    def plain(self, window: int | None) -> Tensor:
        """[B, N, HQ, D] in float64, NaN at padding."""
        hq, d = self.query.shape[1], self.query.shape[3]
        group = hq // self.key.shape[1]
        out = torch.full((self.b, self.n, hq, d), torch.nan, dtype=torch.float64)
        for b, parents in enumerate(self.trees):
            for i, _ in enumerate(parents):
                prefix, nodes = self.seen(b, i, window)
                rows = self.slots[b, prefix]
                for h in range(hq):
                    keys = torch.cat([self.key_pool[h // group, rows], self.key[b, h // group, nodes]]).double()
                    values = torch.cat([self.value_pool[h // group, rows], self.value[b, h // group, nodes]]).double()
                    scores = keys @ self.query[b, h, i].double() / math.sqrt(d)
                    if self.soft_cap is not None:
                        scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
                    weights = scores.exp()
                    rest = 0.0 if self.sinks is None else math.exp(float(self.sinks[h]))
                    out[b, i, h] = weights @ values / (weights.sum() + rest)
        return out


CASES = [((1, 1), 7, 1, (0,)), ((3, 9), 10, 14, (5, 17, 0)), ((2, 2), 16, 33, (31, 8)), ((2, 8), 6, 7, (1, 2, 3))]


@pytest.mark.parametrize("extras", ["", "cap", "sinks", "cap and sinks"])
@pytest.mark.parametrize("window", [None, 1, 6, 16])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_tree_attention_is_softmax_over_prefix_and_ancestors(case: int, window: int | None, extras: str) -> None:
    x = Attention(case, *CASES[case]).with_extras(extras)
    out, wanted = x.run(window), x.plain(window)
    for b, parents in enumerate(x.trees):
        assert relative_error(out[b, : len(parents)], wanted[b, : len(parents)]) < TOLERANCE
    assert torch.isfinite(out).all()  # padding rows too


@pytest.mark.parametrize("window", [None, 5])
def test_attended_set_is_read_back(window: int | None) -> None:
    """Equal scores and one-hot values: the output is the attended set itself, for every node and head."""
    bases, n = (9, 4), 13
    width = 16 + n  # columns: prefix positions, then nodes
    x = Attention(3, (2, 4), width, n, bases)
    x.key.zero_()
    x.key_pool.zero_()
    x.value[:] = torch.eye(width)[16 : 16 + n]
    x.value_pool.fill_(1e3)  # whatever is not of the sequence
    for b, base in enumerate(bases):
        x.value_pool[:, x.slots[b, :base]] = torch.eye(width)[:base]
    out = x.run(window)
    for b, parents in enumerate(x.trees):
        for i, _ in enumerate(parents):
            prefix, nodes = x.seen(b, i, window)
            wanted = sorted(prefix + [16 + j for j in nodes])
            for head in range(4):
                assert torch.nonzero(out[b, i, head]).flatten().tolist() == wanted
                assert out[b, i, head][wanted].tolist() == pytest.approx([1 / len(wanted)] * len(wanted), rel=1e-6)


@pytest.mark.parametrize("extras", ["", "cap and sinks"])
def test_attention_does_not_see_siblings_or_free_rows(extras: str) -> None:
    """Contract (b): keys and values off the path and outside the sequence's rows may be anything finite."""
    x = Attention(4, (2, 6), 8, 17, (11, 6)).with_extras(extras)
    out = x.run()
    owned = torch.zeros(x.key_pool.shape[1], dtype=torch.bool)
    for b, base in enumerate(x.bases):
        owned[x.slots[b, :base]] = True
    x.key_pool[:, ~owned], x.value_pool[:, ~owned] = 30.0, 1e6
    key, value = x.key.clone(), x.value.clone()
    for node in range(17):
        path = path_to(x.trees[0], node)
        others = [i for i in range(17) if i not in path]
        x.key[0, :, others], x.value[0, :, others] = -key[0, :, others], 1e6
        assert relative_error(x.run()[0, node], out[0, node].double()) < 1e-6
        x.key, x.value = key.clone(), value.clone()


def test_width_one_tree_attends_like_a_chain() -> None:
    """A chain of nodes gives what one token at a time over a growing prefix gives."""
    x = Attention(5, (1, 3), 12, 9, (7,))
    x.trees = [list(range(-1, 8))]
    x.positions[0] = 7 + torch.arange(9)
    out = x.run()
    for i in range(9):
        y = Attention(5, (1, 3), 12, 1, (7 + i,))
        y.key_pool[:, y.slots[0, :7]] = x.key_pool[:, x.slots[0, :7]]
        y.value_pool[:, y.slots[0, :7]] = x.value_pool[:, x.slots[0, :7]]
        y.key_pool[:, y.slots[0, 7 : 7 + i]] = x.key[0, :, :i]
        y.value_pool[:, y.slots[0, 7 : 7 + i]] = x.value[0, :, :i]
        y.query, y.key, y.value = (t[:, :, i : i + 1] for t in (x.query, x.key, x.value))
        assert relative_error(y.run()[0, 0], out[0, i].double()) < 1e-6


def test_sink_takes_its_share_and_no_more() -> None:
    """Equal scores and equal values: a sink as high as the scores counts as one key, one far below as none."""
    x = Attention(6, (2, 4), 6, 5, (8,))
    for scores in (x.key, x.key_pool):
        scores.zero_()
    for values in (x.value, x.value_pool):
        values.fill_(1.0)
    x.sinks = torch.tensor([0.0, -1e4, 0.0, -1e4])
    out = x.run()
    for node in range(5):
        seen = sum(len(part) for part in x.seen(0, node, None))
        share = seen / (seen + 1)
        assert out[0, node, :, 0].tolist() == pytest.approx([share, 1.0, share, 1.0], rel=1e-6)


def test_low_scores_beside_high_sinks_do_not_overflow() -> None:
    x = Attention(7, (1, 2), 8, 4, (3,))
    x.sinks = torch.tensor([3e4, -3e4])
    out = x.run()
    assert torch.isfinite(out).all()
    assert float(out[:, :, 0].abs().max()) == 0.0


@pytest.mark.parametrize("extras", ["", "cap and sinks"])
def test_attend_writes_every_row_that_a_commit_may_need(extras: str) -> None:
    """What transformers calls: the same as the kernel, and the nodes' keys and values left for the commit."""
    x = Attention(8, (2, 6), 8, 9, (11, 6)).with_extras(extras)
    ancestor_mask, ancestor_bias = masks(x.trees, x.n)
    nothing = torch.zeros(2, 9, 1, dtype=torch.int64)
    step = StepInputs(x.positions, x.positions, ancestor_mask, ancestor_bias, nothing, x.slots, x.bias, torch.zeros(2))
    left = [torch.full_like(t.transpose(1, 2), torch.nan) for t in (x.key, x.value)]
    view = AttentionView(x.key_pool, x.value_pool, *left)
    settings: dict[str, Any] = {"sliding_window": 6, "softcap": x.soft_cap, "s_aux": x.sinks}
    attend: Any = ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME]
    out, _ = attend(nn.Module(), x.query, x.key, x.value, None, **settings, step=step, attention=view)
    assert torch.equal(out, x.run(6))
    assert torch.equal(left[0], x.key.transpose(1, 2))
    assert torch.equal(left[1], x.value.transpose(1, 2))

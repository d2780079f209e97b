"""Paged tree attention against softmax over what a node may see, in float64, with NaN in whatever nobody may read."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.trees import metadata_of, random_parents
from draftwood.errors import UnsupportedModelError
from tests.support.triton_hooks import IS_INTERPRETED
from tests.verify_service.oracles import path_to, relative_error
from verify_service.kernels.arguments import AttentionSettings, KvPages, TreeMetadata
from verify_service.kernels.reference import tree_attention as reference
from verify_service.kernels.triton.attention_tiling import Gpu, Tiling, choose_tiling
from verify_service.kernels.triton.tree_attention import tree_attention

# What rounding the weights and the output to 16 bits leaves; the interpreter truncates where a GPU rounds.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2 if IS_INTERPRETED else 6e-3}


@dataclass(frozen=True)
class Shape:
    """Heads, nodes, pages, committed lengths and extras of a case."""

    heads: tuple[int, int]  # HKV, HQ
    d: int
    n: int
    bases: tuple[int, ...]
    page_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    tiling: Tiling | None = None


class Scene:
    """B random trees over pages in random order; what is not of a sequence is NaN, page 0 apart."""

    def __init__(self, shape: Shape, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape, self.device = shape, device
        hkv, hq = shape.heads
        b, n, d, page = len(shape.bases), shape.n, shape.d, shape.page_size
        self.trees = [random_parents(random.Random(seed + i), max(n - 3 * i, 1)) for i in range(b)]
        pages = max(-(-base // page) for base in shape.bases) + 1
        slots = (b * pages + 1) * page

        def drawn(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator).to(device, shape.dtype)

        self.q, self.k, self.v = drawn(b, n, hq, d), drawn(b, n, hkv, d), drawn(b, n, hkv, d)
        self.key_pool, self.value_pool = drawn(hkv, slots, d), drawn(hkv, slots, d)
        table = (torch.randperm(b * pages, generator=generator) + 1).view(b, pages).int()
        self.slots: list[Tensor] = []
        owned = torch.zeros(slots, dtype=torch.bool)
        owned[:page] = True
        for i, base in enumerate(shape.bases):
            at = torch.arange(base)
            self.slots.append(table[i].long()[at // page] * page + at % page)
            owned[self.slots[i]] = True
            table[i, -(-base // page) :] = 0
        self.key_pool[:, ~owned], self.value_pool[:, ~owned] = torch.nan, torch.nan
        self.sinks = torch.linspace(-4.0, 5.0, hq, device=device) if shape.sinks else None
        self.tree = metadata_of(self.trees, n, device, base_lengths=shape.bases, page_table=table)

    def run(self, attend: Callable[..., None] = tree_attention, rows: slice = slice(None)) -> Tensor:
        """The output of those rows of the batch, into poisoned memory."""
        shape = self.shape
        q, k, v = (t[rows] for t in (self.q, self.k, self.v))
        out = torch.full_like(q, torch.nan)
        pages = KvPages(self.key_pool, self.value_pool, shape.page_size)
        tree = TreeMetadata(*(getattr(self.tree, field.name)[rows] for field in fields(self.tree)))
        settings = AttentionSettings(shape.d**-0.5, shape.window, shape.soft_cap, self.sinks)
        tiling = {"tiling": shape.tiling} if attend is tree_attention else {}
        attend(q, k, v, pages, tree, settings, out, **tiling)
        return out

    def plain(self) -> Tensor:
        """[B, N, HQ, D] in float64, node by node from the definition."""
        shape = self.shape
        group = shape.heads[1] // shape.heads[0]
        near = shape.window or 1 << 30
        result = torch.zeros(self.q.shape, dtype=torch.float64)
        q, k, v, key_pool, value_pool = (
            t.cpu().double() for t in (self.q, self.k, self.v, self.key_pool, self.value_pool)
        )
        for b, tree in enumerate(self.trees):
            for i in range(shape.n):
                path = path_to(tree, i) if i < len(tree) else [i]
                position = shape.bases[b] + len(path) - 1
                rows = self.slots[b][max(position - near + 1, 0) :]
                nodes = path[max(len(path) - near, 0) :]
                keys = torch.cat([key_pool[:, rows], k[b, nodes].transpose(0, 1)], 1)
                values = torch.cat([value_pool[:, rows], v[b, nodes].transpose(0, 1)], 1)
                scores = torch.einsum("kgd,ktd->kgt", q[b, i].unflatten(0, (-1, group)), keys) / math.sqrt(shape.d)
                if shape.soft_cap is not None:
                    scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
                if self.sinks is not None:
                    sinks = self.sinks.cpu().double().view(-1, group, 1)
                    scores = torch.cat([scores, sinks], 2)
                    values = torch.cat([values, torch.zeros_like(values[:, :1])], 1)
                result[b, i] = torch.einsum("kgt,ktd->kgd", scores.softmax(2), values).flatten(0, 1)
        return result

    def check(self, attend: Callable[..., None] = tree_attention) -> None:
        assert relative_error(self.run(attend).cpu(), self.plain()) < TOLERANCE[self.shape.dtype]


SMALL = Tiling(rows=16, keys=16, warps=4, stages=1, slices=3, least_keys=16)
CASES = {
    "one slice": Shape((1, 1), 16, 5, (0, 3, 16, 37), tiling=replace(SMALL, slices=1)),
    "slices over pages": Shape((2, 6), 32, 5, (50, 16), tiling=SMALL),
    "more slices than keys": Shape((1, 3), 16, 3, (33, 1), tiling=replace(SMALL, slices=9)),
    "fewest keys per slice": Shape((1, 3), 16, 3, (70, 20), tiling=replace(SMALL, slices=9, least_keys=32)),
    "two words": Shape((1, 1), 16, 70, (19,), tiling=Tiling(64, 32, 4, 1, 2, 32)),
    "large key tiles": Shape((1, 2), 16, 9, (150,), tiling=Tiling(16, 128, 4, 1, 1)),
    "large pages": Shape((1, 2), 16, 9, (75, 64), 64, tiling=replace(SMALL, keys=32)),
    "odd page and head sizes": Shape((1, 7), 48, 2, (61,), 24, tiling=SMALL),
    "one node": Shape((2, 12), 64, 1, (47, 16), tiling=SMALL),
    "window": Shape((1, 1), 16, 12, (50, 7), window=6, tiling=SMALL),
    "window of one": Shape((1, 2), 16, 12, (20,), window=1, tiling=SMALL),
    "long window": Shape((1, 2), 16, 12, (50, 5), window=40, tiling=SMALL),
    "soft cap": Shape((1, 2), 16, 7, (20, 0), soft_cap=0.7, tiling=SMALL),
    "sinks": Shape((2, 4), 16, 4, (20, 0), sinks=True, tiling=SMALL),
    "all": Shape((2, 4), 32, 4, (40, 3), window=20, soft_cap=0.9, sinks=True, tiling=SMALL),
    "bfloat16": Shape((1, 3), 32, 7, (40,), sinks=True, dtype=torch.bfloat16, tiling=SMALL),
    "float16": Shape((1, 3), 32, 7, (40,), dtype=torch.float16, tiling=SMALL),
    "tiling by table": Shape((2, 12), 32, 7, (40,)),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_is_softmax_over_prefix_and_ancestors(name: str, device: torch.device) -> None:
    Scene(CASES[name], device).check()


@pytest.mark.parametrize("name", ["all", "two words", "one node"])
def test_plain_twin(name: str, device: torch.device) -> None:
    Scene(CASES[name], device).check(reference.tree_attention)


@pytest.mark.parametrize("window", [None, 5])
def test_attended_set_is_read_back(window: int | None, device: torch.device) -> None:
    """Equal scores and one-hot values: the output is the attended set itself, for every node and head."""
    prefix, n, width = 19, 11, 32
    scene = Scene(Shape((1, 2), width, n, (prefix,), window=window, tiling=SMALL), device, seed=3)
    scene.k.zero_()
    scene.key_pool.zero_()
    one_hot = torch.eye(width, device=device)
    scene.v[0, :, 0] = one_hot[prefix : prefix + n]
    scene.value_pool[0, scene.slots[0]] = one_hot[:prefix]
    out = scene.run()
    near = window or 1 << 30
    for i in range(n):
        path = path_to(scene.trees[0], i)
        position = prefix + len(path) - 1
        wanted = [*range(max(position - near + 1, 0), prefix), *(prefix + j for j in path[max(len(path) - near, 0) :])]
        for head in range(2):
            assert torch.nonzero(out[0, i, head]).flatten().tolist() == wanted
            assert out[0, i, head][wanted].tolist() == pytest.approx([1 / len(wanted)] * len(wanted), rel=1e-6)


def test_siblings_are_not_seen(device: torch.device) -> None:
    """Contract (b), bitwise: keys and values off the path may be anything finite."""
    scene = Scene(Shape((1, 1), 16, 12, (19,), tiling=SMALL), device, seed=4)
    out, key, value = scene.run(), scene.k.clone(), scene.v.clone()
    for node in (5, 11):
        others = [i for i in range(12) if i not in path_to(scene.trees[0], node)]
        scene.k[0, others], scene.v[0, others] = -key[0, others], 1e6
        assert torch.equal(scene.run()[0, node], out[0, node])
        scene.k, scene.v = key.clone(), value.clone()


def test_batch_mates_are_not_seen(device: torch.device) -> None:
    """With the same tiling a row alone is bitwise the row in a batch, whatever lengths the others have."""
    scene = Scene(Shape((1, 2), 16, 5, (50, 0, 3), tiling=SMALL), device)
    together = scene.run()
    for b in range(2):
        assert torch.equal(scene.run(rows=slice(b, b + 1))[0], together[b])


def test_strides_of_a_fused_projection(device: torch.device) -> None:
    """Queries, keys and values may be slices of wider rows, and the output a slice too."""
    scene = Scene(Shape((1, 3), 16, 7, (20,), tiling=SMALL), device)
    wanted = scene.run()
    fused = torch.cat([scene.q, scene.k, scene.v], 2)
    scene.q, scene.k, scene.v = fused[:, :, :3], fused[:, :, 3:4], fused[:, :, 4:]
    assert torch.equal(scene.run(), wanted)


def test_high_sinks_do_not_overflow(device: torch.device) -> None:
    scene = Scene(Shape((1, 2), 16, 4, (20,), sinks=True, tiling=SMALL), device)
    scene.sinks = torch.tensor([3e4, -3e4], device=device)
    out = scene.run()
    assert torch.isfinite(out).all()
    assert float(out[:, :, 0].abs().max()) == 0.0
    assert float(out[:, :, 1].abs().min()) > 0.0


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape((1, 1), 264, 1, (1,)), "head size 264: must be a multiple of 16, at most 256"),
        (Shape((1, 1), 24, 1, (1,)), "head size 24: must be a multiple of 16"),
        (Shape((2, 3), 16, 1, (1,)), "3 query heads over 2 KV heads"),
        (Shape((1, 1), 16, 1, (1,), 8), "page size 8: must be at least 16"),
        (Shape((1, 1), 16, 1, (1,), dtype=torch.float64), "must be one of bfloat16, float16, float32"),
    ],
)
def test_limits_are_named(shape: Shape, message: str, device: torch.device) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        Scene(shape, device).run()


@pytest.mark.parametrize("b", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("n", [1, 16, 32, 64, 128, 256])
def test_programs_fill_the_device(b: int, n: int) -> None:
    """No more than an eighth of the multiprocessors is idle over all waves."""
    tiling = choose_tiling(b, n, 24, 4, 256, torch.bfloat16, Gpu(132, 227 << 10))
    programs = b * 4 * -(-n * 6 // tiling.rows) * tiling.slices
    assert programs / (132 * -(-programs // 132)) > 7 / 8


SERVED = [
    Shape((4, 24), 256, 64, (1000, 333), 64),
    Shape((4, 24), 256, 1, (5000, 0, 64), 64),
    Shape((4, 24), 256, 16, (70, 300), 16, sinks=True),
    Shape((2, 14), 64, 33, (500, 0, 64), 16, 100, 30.0, sinks=True, dtype=torch.float16),
    Shape((8, 8), 128, 256, (900,), 64),
    Shape((8, 32), 96, 40, (200, 31), 64, 50),
    Shape((8, 32), 128, 64, (700, 31), 64),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SERVED)
def test_served_shapes(shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
    dtype = dtype if shape.dtype == torch.float32 else shape.dtype
    scene = Scene(replace(shape, dtype=dtype), device)
    scene.check()
    assert torch.equal(scene.run(), scene.run())

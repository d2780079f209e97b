"""Accepted rows reach the pool slots of their positions, in all layers, and nothing else is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.trees import underived_metadata
from draftwood.errors import UnsupportedModelError
from verify_service.cache.commit_inputs import CommitInputs
from verify_service.cache.pools import Pools
from verify_service.kernels.arguments import Outcome
from verify_service.kernels.reference import commit as reference
from verify_service.kernels.triton.commit import kv_commit

BOTH = pytest.mark.parametrize("commit", [kv_commit, reference.kv_commit], ids=["kernel", "twin"])


class Commit:
    """Commit inputs with random rows, pools full of NaN, and paths of B sequences over shuffled pages."""

    def __init__(
        self,
        shape: tuple[int, int, int, int, int],  # A, B, N, HKV, D
        page_size: int,
        bases: list[int],
        lengths: list[int],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(sum(shape))
        layers, b, n, hkv, d = shape
        self.page_size, self.bases, self.lengths = page_size, bases, lengths
        self.commit_inputs = [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2)]
        pages = max(-(-(base + n) // page_size) for base in bases)
        self.table = (torch.randperm(b * pages, generator=generator) + 1).view(b, pages).int()
        self.paths = [torch.randperm(n, generator=generator)[:16].sort().values.tolist() for _ in range(b)]
        slots = (b * pages + 1) * page_size
        self.pools = [torch.full((layers, hkv, slots, d), torch.nan, dtype=dtype, device=device) for _ in range(2)]
        self.device = device

    def run(self, commit: Callable[..., None]) -> None:
        """Entries of paths beyond their lengths name no node."""
        path = torch.full((len(self.paths), 16), 1 << 20, dtype=torch.int32)
        for b, length in enumerate(self.lengths):
            path[b, :length] = torch.tensor(self.paths[b][:length])
        lengths, nothing = torch.tensor(self.lengths, dtype=torch.int32), torch.empty(0, device=self.device)
        outcome = Outcome(path.to(self.device), lengths.to(self.device), nothing, nothing)
        trees = [[-1]] * len(self.bases)
        tree = underived_metadata(trees, 1, self.device, base_lengths=self.bases, page_table=self.table)
        inputs, pools = CommitInputs(*self.commit_inputs, *[nothing] * 5), Pools(*self.pools, *[nothing] * 3)
        commit(inputs, outcome, pools, tree, self.page_size)

    def wanted(self) -> list[Tensor]:
        """Row by row."""
        pools = [torch.full_like(pool, torch.nan) for pool in self.pools]
        for b, length in enumerate(self.lengths):
            for step, node in enumerate(self.paths[b][:length]):
                position = self.bases[b] + step
                page = int(self.table[b, position // self.page_size])
                for pool, rows in zip(pools, self.commit_inputs, strict=True):
                    pool[:, :, page * self.page_size + position % self.page_size] = rows[:, b, node]
        return pools

    def check(self, commit: Callable[..., None]) -> None:
        self.run(commit)
        for pool, wanted in zip(self.pools, self.wanted(), strict=True):
            assert torch.equal(pool.nan_to_num(-1e4), wanted.nan_to_num(-1e4))
            assert int(pool.isfinite().sum()) > 0


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_go_to_their_positions(commit: Callable[..., None], dtype: torch.dtype, device: torch.device) -> None:
    """Over the edge of a page, into a new page, nothing at all, and odd head counts and sizes."""
    Commit((3, 4, 20, 3, 12), 16, [14, 32, 7, 0], [5, 1, 0, 16], device, dtype).check(commit)


@BOTH
def test_one_layer_and_one_node(commit: Callable[..., None], device: torch.device) -> None:
    Commit((1, 1, 1, 1, 16), 24, [23], [1], device).check(commit)


@pytest.mark.gpu
@pytest.mark.parametrize("b", [1, 8])
def test_served_shape(b: int, device: torch.device) -> None:
    Commit((16, b, 64, 4, 256), 64, [1000 + 61 * i for i in range(b)], [7] * b, device, torch.bfloat16).check(kv_commit)


def test_another_dtype_than_the_pools_is_named(device: torch.device) -> None:
    commit = Commit((1, 1, 1, 1, 16), 16, [0], [1], device)
    commit.commit_inputs = [rows.half() for rows in commit.commit_inputs]
    with pytest.raises(UnsupportedModelError, match=r"float16.*float32"):
        commit.run(kv_commit)


def test_a_view_with_gaps_is_refused(device: torch.device) -> None:
    commit = Commit((1, 1, 2, 1, 16), 16, [0], [1], device)
    commit.commit_inputs = [rows[..., ::2] for rows in commit.commit_inputs]
    with pytest.raises(UnsupportedModelError, match="contiguous"):
        commit.run(kv_commit)

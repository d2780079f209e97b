"""Mamba2 over trees: the kernel against float64."""

import random

import pytest
import torch
from torch import Tensor

from verify_service.kernels.triton.mamba2_verify import mamba2_verify, mamba2_verify_plain


def ancestor_words(parents: list[int]) -> list[list[int]]:
    """One word for 64 nodes, as int64."""
    seen: list[int] = []
    for i, parent in enumerate(parents):
        seen.append((seen[parent] if parent >= 0 else 0) | (1 << i))
    count = -(-len(parents) // 64)
    words = [[(bits >> (64 * w)) & (2**64 - 1) for w in range(count)] for bits in seen]
    return [[word - 2**64 if word >= 2**63 else word for word in row] for row in words]


class Case:
    """Random inputs; row 0 ends in spare nodes, row 1 forgets everything at one node."""

    def __init__(
        self, device: torch.device, *, b: int, n: int, sizes: tuple[int, int, int, int], dtype: torch.dtype
    ) -> None:
        hk, hv, v, k = sizes
        generator, rng = torch.Generator().manual_seed(n), random.Random(n)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        trees = [[-1] + [rng.randrange(max(0, i - 5), i) for i in range(1, n)] for _ in range(b)]
        trees[0] = [-1 if i >= n - 2 else parent for i, parent in enumerate(trees[0])]
        self.ancestors = torch.tensor([ancestor_words(tree) for tree in trees]).to(device)
        self.conv = torch.nn.functional.silu(normal(b, n, hv * v + 2 * hk * k)).to(dtype).to(device)
        self.dt = torch.nn.functional.softplus(normal(b, n, hv)).to(device)
        decay = self.dt.cpu() * torch.rand(hv, generator=generator) * 2
        decay[-1, min(3, n - 1)] = 3e5
        self.g = (-decay).to(device)
        self.states = normal(b + 2, hv, v, k).to(device)
        self.states[0] = torch.nan  # scratch is never read for a sequence
        self.slots = torch.arange(b, 0, -1, dtype=torch.int32, device=device)
        self.skip = normal(hv).to(device)
        self.shape = (b, n, hv, v)

    def arguments(self) -> tuple[Tensor, ...]:
        return self.conv, self.g, self.dt, self.ancestors, self.states, self.slots, self.skip

    def check(self, *, bound: float) -> None:
        before = self.states.clone()
        out = torch.full(self.shape, torch.nan, device=self.conv.device)
        want = torch.empty(self.shape, dtype=torch.float64, device=self.conv.device)
        mamba2_verify(*self.arguments(), out)  # type: ignore[call-arg]
        mamba2_verify_plain(*self.arguments(), want)  # type: ignore[call-arg]
        assert torch.equal(before[1:], self.states[1:])
        for row in range(self.shape[0]):
            error = (out[row].double() - want[row]).norm() / want[row].norm()
            assert float(error) < bound, (row, float(error))


@pytest.mark.parametrize(
    ("n", "sizes"),
    [(1, (1, 2, 16, 16)), (13, (2, 4, 24, 20)), (70, (1, 1, 16, 32))],
    ids=["one node", "odd sizes", "two row blocks"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_outputs_are_float32_near(
    device: torch.device, n: int, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    Case(device, b=2, n=n, sizes=sizes, dtype=dtype).check(bound=2e-6)


def test_siblings_do_not_matter(device: torch.device) -> None:
    """Each path alone, as a chain, gives the same bits."""
    case = Case(device, b=1, n=9, sizes=(1, 2, 16, 16), dtype=torch.bfloat16)
    parents = [-1, 0, 0, 1, 2, 3, 4, 5, 5]
    case.ancestors = torch.tensor([ancestor_words(parents)]).to(device)
    out = torch.full(case.shape, torch.nan, device=device)
    mamba2_verify(*case.arguments(), out)  # type: ignore[call-arg]
    noisy = case.conv.clone()
    noisy[:, [2, 4, 6]] = -7 * noisy[:, [2, 4, 6]]
    case.conv = noisy
    other = torch.full(case.shape, torch.nan, device=device)
    mamba2_verify(*case.arguments(), other)  # type: ignore[call-arg]
    kept = [0, 1, 3, 5, 7, 8]
    assert torch.equal(out[:, kept], other[:, kept])
    assert not torch.equal(out[:, 6], other[:, 6])


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 16, 32, 64, 256])
def test_outputs_at_served_sizes(device: torch.device, n: int) -> None:
    Case(device, b=2, n=n, sizes=(8, 128, 64, 128), dtype=torch.bfloat16).check(bound=2e-6)

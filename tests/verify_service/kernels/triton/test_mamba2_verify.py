"""Mamba2 over trees: the kernel against float64."""

import random

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.trees import metadata_of
from tests.kernels.trees import poisoned
from verify_service.kernels.arguments import LayerCommitInputs
from verify_service.kernels.reference import mamba2_verify as reference
from verify_service.kernels.triton.mamba2_verify import mamba2_verify


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
        trees[0] = trees[0][: max(n - 2, 1)]
        self.tree = metadata_of(trees, n, device)
        conv = torch.nn.functional.silu(normal(b, n, hv * v + 2 * hk * k)).to(dtype)
        dt = torch.nn.functional.softplus(normal(b, n, hv))
        decay = dt * torch.rand(hv, generator=generator) * 2
        decay[-1, min(3, n - 1)] = 3e5
        nothing = torch.empty(0, device=device)
        self.inputs = LayerCommitInputs(nothing, conv.to(device), None, -decay.to(device), dt.to(device))
        self.states = normal(b + 2, hv, v, k).to(device)
        self.states[0] = torch.nan  # scratch is never read for a sequence
        self.skip = normal(hv).to(device)
        self.shape = (b, n, hv, v)

    def run(self) -> Tensor:
        out = poisoned(*self.shape, device=self.states.device)
        mamba2_verify(self.inputs, self.tree, self.states, self.skip, out)
        return out

    def check(self, *, bound: float) -> None:
        before, out = self.states.clone(), self.run()
        assert torch.equal(before[1:], self.states[1:])
        want = poisoned(*self.shape, dtype=torch.float64, device=self.states.device)
        reference.mamba2_verify(self.inputs, self.tree, self.states, self.skip, want)
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
    case.tree = metadata_of([[-1, 0, 0, 1, 2, 3, 4, 5, 5]], 9, device)
    out = case.run()
    case.inputs.conv[:, [2, 4, 6]] *= -7
    other = case.run()
    kept = [0, 1, 3, 5, 7, 8]
    assert torch.equal(out[:, kept], other[:, kept])
    assert not torch.equal(out[:, 6], other[:, 6])


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 16, 32, 64, 256])
def test_outputs_at_served_sizes(device: torch.device, n: int) -> None:
    Case(device, b=2, n=n, sizes=(8, 128, 64, 128), dtype=torch.bfloat16).check(bound=2e-6)

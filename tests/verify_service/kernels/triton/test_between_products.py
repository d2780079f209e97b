"""Residual sums with their norms, and SwiGLU: the kernels against their twins."""

import pytest
import torch

from draftwood.errors import UnsupportedModelError
from tests.kernels.trees import poisoned
from verify_service.kernels.reference import between_products as reference
from verify_service.kernels.triton.between_products import add_norm, swiglu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    """A last bit; the interpreter cuts bfloat16 off where a GPU rounds, at each of two places."""
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[got.dtype]
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def check_sums(m: int, h: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(m)
    wide = torch.randn(m, h + 24, device=device).to(dtype)
    x, delta = wide[:, :h], torch.randn(m, h, device=device).to(dtype)
    weight = torch.rand(h, device=device) + 0.5
    outs = [[poisoned(m, h, dtype=dtype, device=device) for _ in range(2)] for _ in range(2)]
    add_norm(x, delta, weight, 1e-6, *outs[0])
    reference.add_norm(x, delta, weight, 1e-6, *outs[1])
    near(outs[0][0], outs[1][0])
    near(outs[0][1], outs[1][1])


def check_products(m: int, f: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(f)
    x = torch.randn(m, 2 * f + 8, device=device).to(dtype)[:, : 2 * f]
    got, want = (poisoned(m, f, dtype=dtype, device=device) for _ in range(2))
    swiglu(x, got)
    reference.swiglu(x, want)
    near(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "h"), [(1, 64), (5, 96), (3, 1500)])
def test_sums_and_norms_equal_the_twins(device: torch.device, m: int, h: int, dtype: torch.dtype) -> None:
    check_sums(m, h, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "f"), [(1, 64), (4, 1100)])
def test_products_equal_the_twins(device: torch.device, m: int, f: int, dtype: torch.dtype) -> None:
    check_products(m, f, dtype, device)


def test_rows_that_are_too_long_are_refused(device: torch.device) -> None:
    row, weight = torch.zeros(1, 40000, device=device), torch.zeros(40000, device=device)
    with pytest.raises(UnsupportedModelError, match="hidden_size must be at most 32768, not 40000, on a GPU"):
        add_norm(row, row, weight, 1e-6, row, row)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 64, 512])
def test_served_sizes(m: int, device: torch.device) -> None:
    check_sums(m, 5120, torch.bfloat16, device)
    check_products(m, 17408, torch.bfloat16, device)

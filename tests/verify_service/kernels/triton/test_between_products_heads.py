"""Norms and rotation of attention heads, and their values: the kernel against its twin."""

import pytest
import torch

from draftwood.errors import UnsupportedModelError
from verify_service.kernels.arguments import HeadNorms
from verify_service.kernels.reference import between_products as reference
from verify_service.kernels.triton.between_products import rotate_heads


@pytest.mark.parametrize(
    ("m", "hq", "hkv", "d", "r", "step"), [(1, 2, 1, 16, 16, 16), (5, 4, 2, 32, 8, 64), (3, 3, 3, 48, 12, 48)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_twin(
    device: torch.device, dtype: torch.dtype, m: int, hq: int, hkv: int, d: int, r: int, step: int
) -> None:
    torch.manual_seed(m)
    wide = torch.randn(m, hq * step + 2 * hkv * d + 5, device=device, dtype=dtype)
    x = wide[:, : hq * step + 2 * hkv * d]
    angles = torch.rand(m, r // 2, device=device).repeat(1, 2) * 6
    norms = HeadNorms(torch.rand(d, device=device) + 0.5, torch.rand(d, device=device) - 0.5, 1e-6)
    inputs = (x, (angles.cos().to(dtype), angles.sin().to(dtype)), norms, step)
    got, want = (
        [torch.full((m, heads, d), torch.nan, device=device, dtype=dtype) for heads in (hq, hkv, hkv)] for _ in range(2)
    )
    rotate_heads(*inputs, *got)
    reference.rotate_heads(*inputs, *want)
    tolerance = 2e-6 if dtype == torch.float32 else 4e-2  # a last bit of bfloat16
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)
    assert torch.equal(got[2], x[:, hq * step + hkv * d :].view(m, hkv, d))


def test_an_odd_rotary_size_is_refused(device: torch.device) -> None:
    head, weight = torch.zeros(1, 1, 16, device=device), torch.zeros(16, device=device)
    angle, norms = torch.zeros(1, 7, device=device), HeadNorms(weight, weight, 1e-6)
    with pytest.raises(UnsupportedModelError, match="7 rotated values of heads of 16"):
        rotate_heads(torch.zeros(1, 48, device=device), (angle, angle), norms, 16, head, head, head)

"""The likeliest tokens of every depth: the kernel against torch and draftwood.noise."""

import pytest
import torch

from draft_service.kernels.triton.likeliest import likeliest, likeliest_plain, likeliest_workspace


def compare(logits: torch.Tensor, width: int, *, temperatures: list[float]) -> None:
    s, depths, _ = logits.shape
    device = logits.device
    temperature = torch.tensor(temperatures, device=device)
    seed = torch.tensor([(1 << 62) + 7 * i for i in range(s)], device=device) * 3  # wraps: 64 bits
    base = torch.arange(5, 5 + s, dtype=torch.int32, device=device)
    got, want = (
        tuple(
            torch.full((s, depths, width), -7, dtype=dtype, device=device)
            for dtype in (torch.int32, torch.float32, torch.float32)
        )
        for _ in range(2)
    )
    workspace = likeliest_workspace(s * depths, device)
    workspace.sums.fill_(torch.nan)
    likeliest(logits, temperature, seed, base, (got[0], got[1], got[2]), workspace)
    likeliest_plain(logits, temperature, seed, base, (want[0], want[1], want[2]))
    assert torch.equal(got[0], want[0])
    for g, w in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(g, w, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("v", "width"), [(37, 5), (5003, 16)])
def test_likeliest_with_noise_and_without(device: torch.device, v: int, width: int) -> None:
    logits = (torch.randn(2, 2, v, generator=torch.Generator().manual_seed(v)) * 3).to(device)
    compare(logits, width, temperatures=[0.0, 0.8])


def test_ties_go_to_the_lower_id(device: torch.device) -> None:
    """bfloat16 has many, and a flat row is nothing else."""
    logits = torch.randn(1, 2, 4500, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    logits[0, 1] = 0.5
    compare(logits, 16, temperatures=[0.0])


def test_likely_tokens_may_stand_together(device: torch.device) -> None:
    logits = torch.randn(1, 1, 4097, generator=torch.Generator().manual_seed(2)).to(device)
    logits[..., 100:190] += 50
    compare(logits, 64, temperatures=[0.0])


@pytest.mark.gpu
def test_likeliest_at_the_served_size(device: torch.device) -> None:
    logits = (torch.randn(4, 15, 248320, generator=torch.Generator().manual_seed(3)) * 3).bfloat16().to(device)
    compare(logits, 64, temperatures=[0.0] * 4)

"""The likeliest tokens of every depth: the kernel against torch and draftwood.noise."""

import pytest
import torch

from draft_service.kernels.arguments import Candidates, TreeSettings
from draft_service.kernels.reference import likeliest as reference
from draft_service.kernels.triton.likeliest import Likeliest


def compare(logits: torch.Tensor, width: int, *, temperatures: list[float]) -> None:
    s, depths, _ = logits.shape
    device = logits.device
    unread = torch.empty(0, device=device)
    settings = TreeSettings(
        seeds=torch.tensor([(1 << 62) + 7 * i for i in range(s)], device=device) * 3,  # wraps: 64 bits
        temperature=torch.tensor(temperatures, device=device),
        base_lengths=torch.arange(5, 5 + s, dtype=torch.int32, device=device),
        roots=unread,
        budgets=unread,
        widths=unread,
        spines=unread,
    )

    def poisoned() -> Candidates:
        ids = torch.full((s, depths, width), -7, dtype=torch.int32, device=device)
        return Candidates(ids, *(torch.full(ids.shape, torch.nan, device=device) for _ in range(2)))

    got, want, kernel = poisoned(), poisoned(), Likeliest()
    kernel.workspace(s * depths, device).sums.fill_(torch.nan)
    kernel(logits, settings, got)
    reference.likeliest(logits, settings, want)
    assert torch.equal(got.token_ids, want.token_ids)
    torch.testing.assert_close(got.scores, want.scores, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(got.log_probs, want.log_probs, atol=2e-5, rtol=1e-5)


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

"""Best-first trees on the device: the kernel against draftwood.tree."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from draft_service.kernels.arguments import Candidates, TreeNodes, TreeSettings
from draft_service.kernels.reference import best_first as reference
from draft_service.kernels.triton.best_first import best_first


def candidates(s: int, depths: int, width: int, seed: int, device: torch.device, *, step: float = 0.0) -> Candidates:
    """Ids, scores and log-probs; with `step` scores are its multiples, so that paths tie."""
    generator = torch.Generator().manual_seed(seed)
    scores = (torch.randn(s, depths, width, generator=generator) * 2).log_softmax(-1)
    if step:
        scores = (scores / step).round() * step
    scores = scores.sort(-1, descending=True).values
    ids = torch.stack([torch.randperm(1000, generator=generator)[:width] for _ in range(s * depths)])
    own = torch.randn(s, depths, width, generator=generator)
    return Candidates(ids.view(s, depths, width).int().to(device), scores.to(device), own.to(device))


def compare(given: Candidates, n: int, budgets: list[int], widths: list[int], spines: list[int]) -> None:
    s, device = len(budgets), given.token_ids.device

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def poisoned() -> TreeNodes:
        a, b, c, e = (torch.full((s, n), -99, dtype=torch.int32, device=device) for _ in range(4))
        return TreeNodes(a, b, c, torch.full((s, n), torch.nan, device=device), e[:, 0].contiguous())

    unread = torch.empty(0, device=device)
    settings = TreeSettings(
        seeds=unread,
        temperature=unread,
        base_lengths=unread,
        roots=column(list(range(50, 50 + s))),
        budgets=column(budgets),
        widths=column(widths),
        spines=column(spines),
    )
    got, want = poisoned(), poisoned()
    best_first(settings, given, got)
    reference.best_first(settings, given, want)
    for field in fields(got):
        assert getattr(got, field.name).tolist() == getattr(want, field.name).tolist(), field.name


@pytest.mark.parametrize("step", [0.0, 0.5])
def test_trees_are_those_of_the_definition(device: torch.device, step: float) -> None:
    """Different budgets, widths and spines in one batch; with ties and without."""
    compare(candidates(4, 15, 8, 1, device, step=step), 24, [23, 12, 23, 0], [8, 3, 8, 8], [0, 0, 1, 0])


def test_small_blocks_run_out_of_candidates(device: torch.device) -> None:
    compare(candidates(3, 2, 2, 2, device), 16, [15, 15, 15], [2, 2, 1], [0, 1, 0])


def test_a_width_of_one_is_the_chain(device: torch.device) -> None:
    compare(candidates(2, 15, 4, 3, device), 16, [15, 5], [1, 1], [0, 1])


def test_large_trees(device: torch.device) -> None:
    compare(candidates(1, 18, 16, 4, device, step=0.25), 80, [79], [16], [0])


@pytest.mark.gpu
def test_wide_batches(device: torch.device) -> None:
    compare(candidates(32, 15, 64, 5, device, step=0.25), 256, [255] * 32, [64] * 32, [i % 2 for i in range(32)])

"""Best-first trees on the device: the kernel against draftwood.tree."""

import pytest
import torch
from torch import Tensor

from draft_service.kernels.triton.best_first import best_first_trees, best_first_trees_plain


def candidates(
    s: int, depths: int, width: int, seed: int, device: torch.device, *, step: float = 0.0
) -> tuple[Tensor, ...]:
    """Ids, scores and log-probs; with `step` scores are its multiples, so that paths tie."""
    generator = torch.Generator().manual_seed(seed)
    scores = (torch.randn(s, depths, width, generator=generator) * 2).log_softmax(-1)
    if step:
        scores = (scores / step).round() * step
    scores = scores.sort(-1, descending=True).values
    ids = torch.stack([torch.randperm(1000, generator=generator)[:width] for _ in range(s * depths)])
    own = torch.randn(s, depths, width, generator=generator)
    return tuple(part.to(device) for part in (ids.view(s, depths, width).int(), scores, own))


def compare(parts: tuple[Tensor, ...], n: int, budgets: list[int], widths: list[int], spines: list[int]) -> None:
    s, device = len(budgets), parts[0].device

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def poisoned() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        a, b, c, e = (torch.full((s, n), -99, dtype=torch.int32, device=device) for _ in range(4))
        return a, b, c, torch.full((s, n), torch.nan, device=device), e[:, 0].contiguous()

    got, want = poisoned(), poisoned()
    roots, given = column(list(range(50, 50 + s))), (parts[0], parts[1], parts[2])
    settings = column(budgets), column(widths), column(spines)
    best_first_trees(roots, given, *settings, got)
    best_first_trees_plain(roots, given, *settings, want)
    for name, g, w in zip(("token_ids", "parents", "depths", "log_probs", "num_nodes"), got, want, strict=True):
        assert g.tolist() == w.tolist(), name


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

"""Draws at every node: the kernel against draftwood.sampling."""

import numpy as np
import pytest
import torch

from benchmarks.kernels.draw_settings import draw_settings_of
from benchmarks.kernels.trees import underived_metadata
from draftwood.noise import gumbel
from draftwood.sampling import SamplingParams, filtered
from verify_service.kernels.arguments import TreeMetadata
from verify_service.kernels.reference import acceptance as reference
from verify_service.kernels.triton import filters
from verify_service.kernels.triton.acceptance import Sample

ROWS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=2**63 + 5),
    SamplingParams(temperature=0.7, seed=3, top_k=20),
    SamplingParams(temperature=1.3, seed=4, top_p=0.9),
    SamplingParams(temperature=1.0, seed=5, min_p=0.1),
    SamplingParams(temperature=0.9, seed=2**40 + 6, top_k=50, top_p=0.8, min_p=0.02),
    SamplingParams(temperature=0.02, seed=9, top_k=1),
]


def nodes_at(positions: torch.Tensor, counts: list[int]) -> TreeMetadata:
    """So many nodes of each row at these positions [B, N]."""
    tree = underived_metadata([range(-1, count - 1) for count in counts], positions.shape[1], positions.device)
    tree.positions.copy_(positions)
    return tree


def drawn(
    logits: torch.Tensor, rows: list[SamplingParams], nodes: list[int], *, has_filters: bool = True
) -> torch.Tensor:
    """The definition's tokens, with which one call is compared, twice: the workspace must be clean after a call."""
    b, n, _ = logits.shape
    device, sample = logits.device, Sample()
    tree = nodes_at((torch.arange(b * n, device=device) * 31 % 97).view(b, n), nodes)
    settings, want = draw_settings_of(rows, device), torch.full((b, n), -7, dtype=torch.int32, device=device)
    reference.sample(logits, tree, settings, want, has_filters=has_filters)
    for _ in range(2):
        tokens = torch.full((b, n), -7, dtype=torch.int32, device=device)
        sample.workspace(b * n, device).values.fill_(torch.nan)
        sample(logits, tree, settings, tokens, has_filters=has_filters)
        assert torch.equal(tokens, want), (tokens - want).nonzero().tolist()
    return want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_are_those_of_the_definition(device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = ROWS if dtype == torch.float32 else ROWS[:2] + ROWS[5:6]
    logits = (torch.randn(len(rows), 2, 601, generator=generator) * 3).to(dtype).to(device)
    drawn(logits, rows, [2, 1, 1, 1, 1, 1, 1][: len(rows)])


def test_rows_split_over_programs(device: torch.device) -> None:
    logits = (torch.randn(2, 1, 9001, generator=torch.Generator().manual_seed(2)) * 2).bfloat16().to(device)
    drawn(logits, [SamplingParams(), SamplingParams(temperature=1.0, seed=7)], [1, 1], has_filters=False)


def test_ties_go_to_the_lower_id(device: torch.device) -> None:
    logits = torch.zeros(1, 3, 5000, device=device)
    logits[0, 0, [17, 4500]] = 2.0
    logits[0, 1, [4097, 4999]] = 2.0
    logits[0, 2] = -torch.inf
    tokens = torch.full((1, 3), -7, dtype=torch.int32, device=device)
    tree = nodes_at(torch.zeros(1, 3, dtype=torch.int64, device=device), [3])
    Sample()(logits, tree, draw_settings_of([ROWS[0]], device), tokens, has_filters=False)
    assert tokens.tolist() == [[17, 4097, -1]]


def test_noise_decides_between_equal_logits(device: torch.device) -> None:
    """At a flat row the draw is the arg-max of the noise alone, so every bit of it counts."""
    logits = torch.zeros(1, 3, 4099, device=device)
    params = SamplingParams(temperature=1.0, seed=12345)
    drawn(logits, [params], [3], has_filters=False)
    tree, tokens = (
        nodes_at(torch.arange(3, device=device)[None], [3]),
        torch.empty(1, 3, dtype=torch.int32, device=device),
    )
    Sample()(logits, tree, draw_settings_of([params], device), tokens, has_filters=False)
    assert tokens[0].tolist() == [int(gumbel(12345, p + 1, 4099).argmax()) for p in range(3)]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_no_distribution_give_no_token(device: torch.device, value: float) -> None:
    """Wherever the value is, in a tile of whichever program; other rows are drawn for as ever."""
    rows = ROWS
    logits = torch.randn(len(rows), 3, 5001, generator=torch.Generator().manual_seed(6)).to(device)
    logits[:, 0, 4999] = value
    logits[:, 1] = value
    tokens = drawn(logits, rows, [3] * len(rows))
    assert (tokens[:, :2] == -1).all()
    assert (tokens[:, 2] >= 0).all()


@pytest.mark.parametrize("capacity", [4096, 16])  # 16: the tokens that matter do not fit, and the whole row is searched
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7, top_k=20),
        SamplingParams(temperature=0.8, top_p=0.95),
        SamplingParams(temperature=1.5, top_k=200, top_p=0.5),
        SamplingParams(temperature=1.0, min_p=0.05),
        SamplingParams(temperature=2.0, top_k=40, top_p=0.9, min_p=0.2),
    ],
)
def test_filters_keep_the_same_tokens(
    device: torch.device, params: SamplingParams, capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 logits have many ties at the edge of what is kept."""
    monkeypatch.setattr(filters, "CAPACITY", capacity)
    logits = (torch.randn(1, 777, generator=torch.Generator().manual_seed(3)) * 2).bfloat16().to(device)
    logits[0, 5], logits[0, 6] = 0.0, -0.0
    workspace = filters.FilterWorkspace(1, device)
    counts = torch.ones(1, dtype=torch.int32, device=device)
    filters.find_thresholds(logits, counts, 1, draw_settings_of([params], device), workspace)
    row = logits[0].float().cpu().numpy()
    scaled = row / np.float32(params.temperature) + np.float32(0.0)
    order = scaled.view(np.int32)
    order = (order ^ ((order >> 31) & 0x7FFFFFFF)).astype(np.int64)
    ranks = (order << 32) | (0x7FFFFFFF - np.arange(row.shape[0]))
    kept = ranks >= int(workspace.limits[0])
    assert np.flatnonzero(kept).tolist() == np.flatnonzero(np.isfinite(filtered(row, params))).tolist()
    assert not any(part.any() for part in (workspace.gathered, workspace.arrived))


def test_rows_without_filters_keep_everything(device: torch.device) -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(4)).to(device)
    workspace = filters.FilterWorkspace(1, device)
    counts = torch.ones(1, dtype=torch.int32, device=device)
    filters.find_thresholds(logits, counts, 1, draw_settings_of([SamplingParams(temperature=1.0)], device), workspace)
    assert int(workspace.limits[0]) < -(2**62)
    assert not workspace.ranks.any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_at_the_served_size(device: torch.device, dtype: torch.dtype) -> None:
    logits = (torch.randn(len(ROWS), 8, 248320, generator=torch.Generator().manual_seed(5)) * 3).to(dtype).to(device)
    drawn(logits, ROWS, [8] * len(ROWS))

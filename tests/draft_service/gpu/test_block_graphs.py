"""Passes over static buffers give the trees that passes over the cache itself give."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from draft_service.draft.drafter import Drafter
from draft_service.draft.types import ContextRows, Drafted, SequenceStep
from draft_service.gpu.block_graphs import row_bucket
from draft_service.kernels.reference.kernel_set import PLAIN
from draft_service.model.draft_model import attention_by_products
from draftwood.sampling import SamplingParams
from draftwood.tree_options import TreeOptions
from tests.draft_service.conftest import MakeDrafter, load_drafter
from tests.draft_service.draft.test_drafter import GREEDY, TREE, on_time, rows_of
from tests.draft_service.model.test_draft_model import FLASH
from tests.draft_service.plain_dflash import MIXED, SLIDING

CONFIGS: tuple[dict[str, Any], ...] = (
    {},
    {"layer_types": SLIDING, "sliding_window": 11},
    {"layer_types": SLIDING, "sliding_window": 4, "is_causal": False},
    {"layer_types": MIXED, "sliding_window": 11, "is_causal": True},
    {"dflash_config": FLASH | {"sample_from_anchor": True}},
)


def drafts(drafter: Drafter, lengths: dict[int, int]) -> list[Drafted]:
    steps = [
        SequenceStep(i, 1, n, 17 + i, ContextRows(0, rows_of(n, seed=i)) if n else None, TREE)
        for i, n in lengths.items()
    ]
    results = drafter.step(1, steps, (), on_time).results
    assert all(isinstance(result, Drafted) for result in results), results
    return results  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("changes", CONFIGS)
def test_trees_are_the_same(make_drafter: MakeDrafter, changes: dict[str, Any], on_device: bool) -> None:
    plain, draft, target = make_drafter(**changes)
    graphed = load_drafter(draft, target, graphs=True, kernels=PLAIN if on_device else None)
    for lengths in ({1: 20}, {2: 5, 3: 0, 4: 31}, {1: 21, 2: 40}):
        for wanted, got in zip(drafts(plain, lengths), drafts(graphed, lengths), strict=True):
            assert got.tree.token_ids == wanted.tree.token_ids
            assert got.tree.parents == wanted.tree.parents
            assert got.tree.log_probs == pytest.approx(wanted.tree.log_probs, abs=1e-4)


def test_options_and_settings_of_a_batch(make_drafter: MakeDrafter) -> None:
    """Chains, spines, budgets, widths and noise side by side; what the kernels do not know is the host's."""
    plain, draft, target = make_drafter()
    graphed = load_drafter(draft, target, graphs=True, kernels=PLAIN)
    noisy = SamplingParams(temperature=0.7, seed=2**63 + 9)
    batches = (
        ((TreeOptions("dflash", 4, 8), GREEDY), (TreeOptions("ddtree", 20, 4, spine=True), noisy)),
        ((TREE, noisy), (TreeOptions("dflash", 30, 8), noisy), (TreeOptions("ddtree", 2, 64), GREEDY)),
        ((TREE, SamplingParams(logit_bias={5: 9.0})), (TreeOptions("ddtree", 6, 4, num_candidates=3), GREEDY)),
    )
    for number, batch in enumerate(batches):
        steps = [
            SequenceStep(10 * number + i, 1, 9 + i, 40 + i, ContextRows(0, rows_of(9 + i, seed=i)), options, sampling)
            for i, (options, sampling) in enumerate(batch)
        ]
        wanted, got = (drafter.step(1, steps, (), on_time).results for drafter in (plain, graphed))
        for mine, theirs in zip(got, wanted, strict=True):
            assert isinstance(mine, Drafted)
            assert isinstance(theirs, Drafted)
            assert (mine.tree.token_ids, mine.tree.parents) == (theirs.tree.token_ids, theirs.tree.parents)
            assert mine.tree.log_probs == pytest.approx(theirs.tree.log_probs, abs=1e-4)
            assert (mine.candidates is None) == (theirs.candidates is None)
        for drafter in (plain, graphed):
            drafter.close_stream(1)


def test_attention_by_products_is_attention() -> None:
    torch.manual_seed(0)
    queries, keys, values = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 11, 8), torch.randn(2, 3, 11, 8)
    for mask in (None, (torch.rand(2, 1, 5, 11) < 0.5) | (torch.arange(11) == 4)):
        wanted = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        torch.testing.assert_close(attention_by_products(queries, keys, values, mask), wanted)


def test_row_buckets() -> None:
    assert [row_bucket(n) for n in (0, 256, 257, 384, 385, 1000, 1031, 1536, 1537)] == [
        256, 256, 384, 384, 512, 1024, 1536, 1536, 2048,
    ]  # fmt: skip

"""Passes over static buffers give the trees that passes over the cache itself give."""

from typing import Any

import pytest

from draft_service.drafter import ContextRows, Drafted, Drafter, SequenceStep
from tests.draft_service.conftest import MakeDrafter, load_drafter
from tests.draft_service.plain_dflash import MIXED, SLIDING
from tests.draft_service.test_drafter import TREE, on_time, rows_of
from tests.draft_service.test_model import FLASH

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


@pytest.mark.parametrize("changes", CONFIGS)
def test_trees_are_the_same(make_drafter: MakeDrafter, changes: dict[str, Any]) -> None:
    plain, draft, target = make_drafter(**changes)
    graphed = load_drafter(draft, target, graphs=True)
    for lengths in ({1: 20}, {2: 5, 3: 0, 4: 31}, {1: 21, 2: 40}):
        for wanted, got in zip(drafts(plain, lengths), drafts(graphed, lengths), strict=True):
            assert got.tree.token_ids == wanted.tree.token_ids
            assert got.tree.parents == wanted.tree.parents
            assert got.tree.log_probs == pytest.approx(wanted.tree.log_probs, abs=1e-4)

"""The engine by values: context that overlaps, gaps, restarts and ends; rankings and trees."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from draft_service.draft.candidates import CandidateRanker, build_tree, likeliest
from draft_service.draft.drafter import Drafter
from draft_service.draft.types import ContextRows, Drafted, Refusal, RefusalReason, SequenceStep
from draftwood.noise import gumbel
from draftwood.sampling import SamplingParams
from draftwood.tree import DraftTree
from draftwood.tree_options import TreeOptions
from tests.draft_service.conftest import MakeDrafter
from tests.draft_service.plain_dflash import SLIDING

TREE = TreeOptions("ddtree", 12, 8)
GREEDY = SamplingParams()


def rows_of(length: int, seed: int = 0) -> Tensor:
    return torch.randn(length, 48, generator=torch.Generator().manual_seed(seed))


def on_time() -> bool:
    return False


def draft(drafter: Drafter, base: int, context: ContextRows | None, **values: Any) -> Drafted | Refusal:
    settings: dict[str, Any] = {"sequence_id": 1, "epoch": 1, "root": 17, "tree": TREE} | values
    (result,) = drafter.step(1, [SequenceStep(base_length=base, context=context, **settings)], (), on_time).results
    assert result is not None
    return result


def tree(result: Drafted | Refusal) -> DraftTree:
    assert isinstance(result, Drafted), result
    return result.tree


def refusal(result: Drafted | Refusal) -> Refusal:
    assert isinstance(result, Refusal), result
    return result


def test_overlapping_rows_are_ignored(make_drafter: MakeDrafter) -> None:
    drafter, _, _ = make_drafter()
    rows = rows_of(20)
    whole = tree(draft(drafter, 20, ContextRows(0, rows), sequence_id=2))
    draft(drafter, 12, ContextRows(0, rows[:12]))
    garbage = torch.cat([torch.full((5, 48), 9.0), rows[12:]])
    assert tree(draft(drafter, 20, ContextRows(7, garbage))) == whole
    assert tree(draft(drafter, 20, ContextRows(3, garbage[:6]))) == whole
    assert tree(draft(drafter, 20, None)) == whole


def test_gaps_say_what_is_there(make_drafter: MakeDrafter) -> None:
    drafter, _, _ = make_drafter()
    rows = rows_of(20)
    missing = refusal(draft(drafter, 5, None))
    assert (missing.reason, missing.context_length) == (RefusalReason.CONTEXT_INCOMPLETE, 0)
    draft(drafter, 8, ContextRows(0, rows[:8]))
    for context, known in ((ContextRows(12, rows[12:]), 8), (ContextRows(8, rows[8:15]), 15), (None, 15)):
        refused = refusal(draft(drafter, 20, context))
        assert (refused.reason, refused.context_length) == (RefusalReason.CONTEXT_INCOMPLETE, known)
    assert tree(draft(drafter, 20, ContextRows(15, rows[15:]))).num_nodes == 13


def test_base_before_the_cached_end_is_invalid(make_drafter: MakeDrafter) -> None:
    drafter, _, _ = make_drafter()
    draft(drafter, 8, ContextRows(0, rows_of(8)))
    assert refusal(draft(drafter, 7, None)).reason is RefusalReason.INVALID


def test_a_new_epoch_starts_over(make_drafter: MakeDrafter) -> None:
    drafter, _, _ = make_drafter()
    rows = rows_of(9)
    first = tree(draft(drafter, 9, ContextRows(0, rows)))
    other = rows_of(9, seed=1)
    assert refusal(draft(drafter, 9, None, epoch=2)).context_length == 0
    assert tree(draft(drafter, 9, ContextRows(0, other), epoch=2)) != first
    assert "already at epoch 2" in refusal(draft(drafter, 9, ContextRows(0, rows), epoch=1)).message
    assert tree(draft(drafter, 9, ContextRows(0, rows), epoch=3)) == first
    assert drafter.cache.num_free == 5


def test_slots_are_bounded_and_come_back(make_drafter: MakeDrafter) -> None:
    drafter, _, _ = make_drafter()
    total = drafter.cache.num_free
    for i in range(total):
        tree(draft(drafter, 4, ContextRows(0, rows_of(4)), sequence_id=i))
    assert refusal(draft(drafter, 4, ContextRows(0, rows_of(4)), sequence_id=99)).reason is RefusalReason.CACHE_FULL
    drafter.step(1, [], [3, 3, 12345], on_time)
    assert drafter.cache.num_free == 1
    tree(draft(drafter, 4, ContextRows(0, rows_of(4)), sequence_id=99))
    drafter.step(2, [], [4], on_time)  # another stream's sequence 4 does not exist
    assert drafter.cache.num_free == 0
    drafter.close_stream(1)
    assert drafter.cache.num_free == total


def test_context_is_bounded(make_drafter: MakeDrafter) -> None:
    drafter, _, _ = make_drafter({"max_context": 10})
    assert refusal(draft(drafter, 11, ContextRows(0, rows_of(11)))).reason is RefusalReason.CACHE_FULL
    assert tree(draft(drafter, 10, ContextRows(0, rows_of(10)))).num_nodes == 13


def test_windowed_context_may_start_late(make_drafter: MakeDrafter) -> None:
    drafter, _, _ = make_drafter(layer_types=SLIDING, sliding_window=9)
    rows = rows_of(50)
    whole = tree(draft(drafter, 50, ContextRows(0, rows), sequence_id=2))
    assert tree(draft(drafter, 50, ContextRows(42, rows[42:]))).token_ids == whole.token_ids
    short = refusal(draft(drafter, 50, ContextRows(43, rows[43:]), sequence_id=3))
    assert (short.reason, short.context_length) == (RefusalReason.CONTEXT_INCOMPLETE, 0)
    again = tree(draft(drafter, 50, ContextRows(41, rows[41:]), sequence_id=3))
    assert again.token_ids == whole.token_ids
    assert again.log_probs == pytest.approx(whole.log_probs, abs=1e-4)


def test_more_sequences_than_a_batch(make_drafter: MakeDrafter) -> None:
    drafter, _, _ = make_drafter()  # batches of three
    lengths = [4, 9, 2, 7, 5]
    contexts = [ContextRows(0, rows_of(n, seed=n)) for n in lengths]
    steps = [SequenceStep(i, 1, n, 17 + i, c, TREE) for i, (n, c) in enumerate(zip(lengths, contexts, strict=True))]
    together = drafter.step(1, steps, (), on_time).results
    drafter.close_stream(1)
    for step, result in zip(steps, together, strict=True):
        assert isinstance(result, Drafted)
        alone = tree(draft(drafter, step.base_length, step.context, root=step.root, sequence_id=step.sequence_id))
        assert result.tree.token_ids == alone.token_ids
        assert result.tree.log_probs == pytest.approx(alone.log_probs, abs=1e-4)


def test_late_messages_bring_their_context_all_the_same(make_drafter: MakeDrafter) -> None:
    drafter, _, _ = make_drafter()
    step = SequenceStep(1, 1, 6, 17, ContextRows(0, rows_of(6)), TREE)
    (result,) = drafter.step(1, [step], (), lambda: True).results
    assert isinstance(result, Refusal)
    assert result.reason is RefusalReason.DEADLINE
    tree(draft(drafter, 6, None))


def test_chain_is_the_top_of_every_depth(make_drafter: MakeDrafter) -> None:
    drafter, _, _ = make_drafter()
    context = ContextRows(0, rows_of(8))
    result = draft(drafter, 8, context, tree=TreeOptions("dflash", 4, 8, num_candidates=3))
    assert isinstance(result, Drafted)
    assert result.candidates is not None
    assert len(result.candidates.token_ids) == 6
    best = [ids[0] for ids in result.candidates.token_ids]
    assert result.tree.token_ids == (17, *best[:4])
    assert tree(draft(drafter, 8, None, tree=TreeOptions("dflash", 200, 8))).token_ids == (17, *best)


@pytest.mark.parametrize("spine", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_prefix_is_a_tree(make_drafter: MakeDrafter, spine: bool, temperature: float) -> None:
    drafter, _, _ = make_drafter()
    options, sampling = TreeOptions("ddtree", 60, 5, spine), SamplingParams(temperature=temperature, seed=3)
    drafted = tree(draft(drafter, 8, ContextRows(0, rows_of(8)), tree=options, sampling=sampling))
    assert drafted.num_nodes == 61
    assert drafted.max_depth <= 6
    for n in range(1, 61):
        cut = drafted.prefix(n)
        assert DraftTree.from_nodes(17, cut.token_ids[1:], cut.parents[1:], cut.log_probs[1:]) == cut
    if spine:
        assert drafted.depths[:7] == (0, 1, 2, 3, 4, 5, 6)


def test_ranking_uses_the_targets_noise() -> None:
    torch.manual_seed(1)
    logits = torch.randn(5, 300) * 2
    ranker = CandidateRanker(300, 7, torch.device("cpu"))
    sampling = SamplingParams(temperature=0.7, seed=2**63 + 11, logit_bias={4: 2.0})
    ranking = ranker.rank(logits, 6, sampling, 40)
    own = logits.log_softmax(-1)
    for depth in range(5):
        noisy = logits[depth].clone()
        noisy[4] += 2.0
        noisy += 0.7 * torch.from_numpy(gumbel(sampling.seed, 41 + depth, 300))
        scores, ids = noisy.log_softmax(-1).topk(6)
        assert ranking.token_ids[depth] == ids.tolist()
        assert ranking.scores[depth] == pytest.approx(scores.tolist(), abs=1e-5)
        assert ranking.log_probs[depth] == pytest.approx(own[depth, ids].tolist(), abs=1e-5)
    assert ranker.rank(logits, 6, GREEDY, 40).token_ids == likeliest(logits, 6).token_ids


def test_noise_changes_the_order_and_not_the_log_probs(make_drafter: MakeDrafter) -> None:
    drafter, _, _ = make_drafter()
    plain = draft(drafter, 8, ContextRows(0, rows_of(8)), tree=TreeOptions("ddtree", 20, 8, num_candidates=64))
    assert isinstance(plain, Drafted)
    noisy = tree(draft(drafter, 8, None, sampling=SamplingParams(temperature=1.0, seed=7)))
    assert noisy.token_ids != plain.tree.token_ids[:13]
    assert plain.candidates is not None
    known = [
        dict(zip(*pair, strict=True))
        for pair in zip(plain.candidates.token_ids, plain.candidates.log_probs, strict=True)
    ]
    checked = 0
    for token, depth, log_prob in list(zip(noisy.token_ids, noisy.depths, noisy.log_probs, strict=True))[1:]:
        if token in known[depth - 1]:
            assert log_prob == pytest.approx(known[depth - 1][token], abs=1e-5)
            checked += 1
    assert checked > 3


def test_log_probs_cover_the_whole_vocabulary() -> None:
    logits = torch.zeros(2, 1000)
    assert likeliest(logits, 3).log_probs[0] == pytest.approx([-math.log(1000)] * 3)
    ranking = CandidateRanker(1000, 2, torch.device("cpu")).rank(logits, 3, GREEDY, 1)
    assert build_tree(5, ranking, TreeOptions("ddtree", 3, 3)).num_nodes == 4

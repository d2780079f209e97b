"""Best-first trees on the device: draftwood.tree.best_first for a batch, one program per sequence.

The heap is an array with a lane for each entry. An entry that is taken leaves its place to its next sibling, and its
first child takes a new one, so that there are no more entries than picks. Sums are float64 and ties go to the smaller
rank tuple, as there; a tuple is two words of seven bits per rank.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draft_service.kernels.arguments import Candidates, TreeNodes, TreeSettings
from draftwood.errors import UnsupportedModelError
from draftwood.tree import MAX_TREE_BUDGET

MAX_DEPTH = 18  # two words of nine ranks
_LAST = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def _read(words, slot, i):
    return tl.sum(tl.where(i == slot, words, 0), 0)


@triton.jit
def _with_rank(high, low, depth, code):
    """The tuple's words after `code` is added to its place at 0-based `depth`."""
    shift = (tl.where(depth < 9, 8 - depth, 17 - depth) * 7).to(tl.int64)
    bits = code.to(tl.int64) << shift
    return tl.where(depth < 9, high + bits, high), tl.where(depth < 9, low, low + bits)


@triton.jit
def _best_first_kernel(
    roots, candidate_ids, scores, log_probs, budgets, widths, spines, token_ids, parents, depths, values, num_nodes,
    DEPTHS, WIDTH, N, ENTRIES: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid (S,). ENTRIES: places in the heap; BN: N rounded up to a power of two."""
    s = tl.program_id(0)
    n = tl.arange(0, BN)
    out = s * N
    tl.store(token_ids + out + n, tl.where(n == 0, tl.load(roots + s), 0), mask=n < N)
    tl.store(parents + out + n, -1, mask=n < N)
    tl.store(depths + out + n, 0, mask=n < N)
    tl.store(values + out + n, 0.0, mask=n < N)
    tl.debug_barrier()
    budget = tl.minimum(tl.load(budgets + s), N - 1)
    width = tl.minimum(tl.load(widths + s), WIDTH)
    has_spine = tl.load(spines + s) != 0
    at = s * DEPTHS * WIDTH
    count = tl.zeros([], tl.int32)
    if has_spine:
        while (count < budget) & (count < DEPTHS):
            tl.store(token_ids + out + count + 1, tl.load(candidate_ids + at + count * WIDTH))
            tl.store(values + out + count + 1, tl.load(log_probs + at + count * WIDTH))
            tl.store(parents + out + count + 1, count)
            tl.store(depths + out + count + 1, count + 1)
            count += 1
    forced = count
    i = tl.arange(0, ENTRIES)
    # Minus the path's score; its rank tuple; parent << 32 | depth << 16 | rank << 8 | whether all ranks are 0.
    first = -tl.load(scores + at).to(tl.float64)
    negative = tl.where(i == 0, first, float("inf"))
    high = tl.where(i == 0, tl.full([ENTRIES], 1 << 56, tl.int64), _LAST)
    low = tl.where(i == 0, tl.full([ENTRIES], 0, tl.int64), _LAST)
    entry = tl.where(i == 0, tl.full([ENTRIES], 1, tl.int64), 0)
    used = tl.full([], 1, tl.int32)
    best = tl.min(negative, 0)
    while (count < budget) & (best < float("inf")):
        is_best = negative == best
        if tl.sum(is_best.to(tl.int32), 0) > 1:
            is_best = is_best & (high == tl.min(tl.where(is_best, high, _LAST), 0))
            is_best = is_best & (low == tl.min(tl.where(is_best, low, _LAST), 0))
        slot = tl.min(tl.where(is_best, i, ENTRIES), 0)
        taken, h, w = _read(entry, slot, i), _read(high, slot, i), _read(low, slot, i)
        parent, depth, rank = (taken >> 32).to(tl.int32), ((taken >> 16) & 0xFF).to(tl.int32), (taken >> 8) & 0xFF
        rank = rank.to(tl.int32)
        is_forced = ((taken & 1) != 0) & (depth < forced)
        node = tl.where(is_forced, depth + 1, count + 1)
        where_ = at + depth * WIDTH + rank
        if node == count + 1:
            tl.store(token_ids + out + node, tl.load(candidate_ids + where_))
            tl.store(values + out + node, tl.load(log_probs + where_))
            tl.store(parents + out + node, parent)
            tl.store(depths + out + node, depth + 1)
            count += 1
        # The next sibling, in the same place.
        score = tl.load(scores + where_).to(tl.float64)
        next_score = tl.load(scores + where_ + 1, mask=rank + 1 < width, other=0.0).to(tl.float64)
        sibling = tl.where(rank + 1 < width, best + score - next_score, float("inf"))
        sibling_h, sibling_w = _with_rank(h, w, depth, tl.full([], 1, tl.int32))
        # The first child, in a new one.
        has_child = depth + 1 < DEPTHS
        child_score = tl.load(scores + at + (depth + 1) * WIDTH, mask=has_child, other=0.0).to(tl.float64)
        child = tl.where(has_child, best - child_score, float("inf"))
        child_h, child_w = _with_rank(h, w, depth + 1, tl.full([], 1, tl.int32))
        child_entry = (node.to(tl.int64) << 32) | ((depth + 1).to(tl.int64) << 16) | (taken & 1)
        at_slot, at_new = i == slot, i == used
        negative = tl.where(at_slot, sibling, tl.where(at_new, child, negative))
        high = tl.where(at_slot, sibling_h, tl.where(at_new, child_h, high))
        low = tl.where(at_slot, sibling_w, tl.where(at_new, child_w, low))
        entry = tl.where(at_slot, (taken & ~1) + (1 << 8), tl.where(at_new, child_entry, entry))
        used += 1
        best = tl.min(negative, 0)
    tl.store(num_nodes + s, count + 1)


def best_first(settings: TreeSettings, candidates: Candidates, trees: TreeNodes) -> None:
    """Raises UnsupportedModelError for more depths or nodes than there is room for."""
    s, num_depths, width = candidates.token_ids.shape
    n = trees.token_ids.shape[1]
    if num_depths > MAX_DEPTH:
        raise UnsupportedModelError(f"a block has {num_depths} depths, more than {MAX_DEPTH}", field="block_size")
    if n - 1 > MAX_TREE_BUDGET:
        raise UnsupportedModelError(f"tree_budget is {n - 1}, more than {MAX_TREE_BUDGET}", field="tree_budget")
    _best_first_kernel[(s,)](
        settings.roots, candidates.token_ids, candidates.scores, candidates.log_probs, settings.budgets,
        settings.widths, settings.spines, trees.token_ids, trees.parents, trees.depths, trees.log_probs,
        trees.num_nodes, num_depths, width, n,
        triton.next_power_of_2(n + num_depths), triton.next_power_of_2(n), num_warps=1,
    )  # fmt: skip

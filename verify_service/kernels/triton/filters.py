"""Top-k, top-p and min-p as one threshold per row, found without sorting the vocabulary.

A token's rank is one integer: its scaled logit, then its id, lower ids above. What the three filters keep together are
the tokens whose rank is at least some limit, so that the draw needs the limit alone. Two looks at a row, split over
programs, give first the largest logit of every group of GROUP tokens, and the mass: the k-th of these peaks is a floor
under the k-th of all logits, and mostly close to it. Then the tokens from that floor upwards are gathered in any order,
and one program bisects among them: for top-k on how many there are above, for top-p on their mass.

Where the tokens that matter are more than CAPACITY (a top-k of thousands, a flat row) that program goes through the
whole row some ten times, until those that are still in question are few enough to be listed.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.kernels.rank import order_of, rank_of, value_of
from verify_service.kernels.arguments import DrawSettings
from verify_service.kernels.triton.launch import require

LEAST_TEMPERATURE = 1e-5  # as SamplingParams.is_greedy
CAPACITY = 4096
MAX_SPLITS = 256
BLOCK, NUM_WARPS = 4096, 8
MAX_PEAKS = 4096
NUCLEUS = 1024  # peaks above the floor where there is no top-k
_LOWEST = tl.constexpr(-(2**63) + 1)


class FilterWorkspace:
    """Scratch memory, kept between calls; `gathered` and `arrived` are zero before and after each."""

    def __init__(self, rows: int, device: torch.device) -> None:
        def zeros(dtype: torch.dtype, *size: int) -> Tensor:
            return torch.zeros(rows, *size, dtype=dtype, device=device)

        self.limits = zeros(torch.int64)  # [rows] the least rank that is kept
        self.peaks = zeros(torch.float32, MAX_PEAKS)  # [rows, MAX_PEAKS]
        self.partial = zeros(torch.float32, 2, MAX_SPLITS)  # [rows, 2, MAX_SPLITS] largest logit and mass of each split
        self.floor = zeros(torch.int32)  # [rows] the order of the least logit that is gathered
        self.mass = zeros(torch.float64, 2)  # [rows, 2] largest logit of the row, mass relative to it
        self.ranks = zeros(torch.int64, CAPACITY)  # [rows, CAPACITY]
        self.gathered = zeros(torch.int32)  # [rows]
        self.arrived = zeros(torch.int32)  # [rows]


@triton.jit
def scale(x, temperature):
    """Logits over the temperature as numpy divides; zeros have one sign."""
    scaled = tl.div_rn(x, temperature + tl.zeros_like(x))
    return tl.where(scaled == 0.0, 0.0, scaled)


@triton.jit
def _is_filtered(temperature, top_k, top_p, min_p, V, LEAST: tl.constexpr):
    return (temperature >= LEAST) & (((top_k > 0) & (top_k < V)) | (top_p < 1.0) | (min_p > 0.0))


@triton.jit
def _tile(logits, row, row_stride, temperature, first, V, BLOCK: tl.constexpr):
    """Scaled logits and ids of a tile, -inf past the end."""
    ids = first + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * row_stride + ids, mask=ids < V, other=float("-inf"))
    return scale(x.to(tl.float32), temperature), ids


@triton.jit
def _survey_kernel(
    logits, num_nodes, temperature, top_k, top_p, min_p, limits, peaks, partial, floor, mass, arrived,
    row_stride, N, V, MAX_SPLITS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, MAX_PEAKS: tl.constexpr,
    LEAST: tl.constexpr, NUCLEUS: tl.constexpr,
):  # fmt: skip
    """Grid (splits, B * N)."""
    split, row, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    b = row // N
    t, k, p, least = tl.load(temperature + b), tl.load(top_k + b), tl.load(top_p + b), tl.load(min_p + b)
    if _is_filtered(t, k, p, least, V, LEAST) & (row % N < tl.load(num_nodes + b)):
        x, _ = _tile(logits, row, row_stride, t, split * BLOCK, V, BLOCK)
        tops = tl.max(tl.reshape(x, [BLOCK // GROUP, GROUP]), 1)
        tl.store(peaks + row * MAX_PEAKS + split * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP), tops)
        largest = tl.max(tops, 0)
        shifted = tl.where(x > float("-inf"), x - largest, float("-inf"))
        tl.store(partial + row * 2 * MAX_SPLITS + split, largest)
        tl.store(partial + row * 2 * MAX_SPLITS + MAX_SPLITS + split, tl.sum(tl.exp(shifted), 0))
        tl.debug_barrier()
        if tl.atomic_add(arrived + row, 1) == splits - 1:
            lane = tl.arange(0, MAX_SPLITS)
            at = partial + row * 2 * MAX_SPLITS + lane
            heads = tl.load(at, mask=lane < splits, other=float("-inf"), cache_modifier=".cg")
            sums = tl.load(at + MAX_SPLITS, mask=lane < splits, other=0.0, cache_modifier=".cg").to(tl.float64)
            top = tl.max(heads, 0)
            parts = tl.where(heads > float("-inf"), sums * tl.exp((heads - top).to(tl.float64)), 0.0)
            tl.store(mass + row * 2, top.to(tl.float64))
            tl.store(mass + row * 2 + 1, tl.sum(parts, 0))
            i = tl.arange(0, MAX_PEAKS)
            has_peak = i < splits * (BLOCK // GROUP)
            all_peaks = tl.load(peaks + row * MAX_PEAKS + i, mask=has_peak, other=float("-inf"), cache_modifier=".cg")
            orders = order_of(all_peaks)
            wanted = tl.where((k > 0) & (k < V), k, NUCLEUS)
            low = order_of(tl.full([], float("-inf"), tl.float32)).to(tl.int64)
            high = order_of(top).to(tl.int64) + 1
            while high - low > 1:  # at least `wanted` peaks are not below `low`
                middle = (low + high) >> 1
                is_enough = tl.sum((orders >= middle).to(tl.int32), 0) >= wanted
                low = tl.where(is_enough, middle, low)
                high = tl.where(is_enough, high, middle)
            tl.store(floor + row, low.to(tl.int32))
            tl.store(arrived + row, 0)
    elif split == 0:
        tl.store(limits + row, _LOWEST)


@triton.jit
def _measure(logits, row, row_stride, temperature, V, low, least_rank, top, BLOCK: tl.constexpr):
    """Of a whole row: how many tokens have a rank of at least `low`, and their mass from `least_rank` upwards."""
    counts = tl.zeros([BLOCK], tl.int32)
    masses = tl.zeros([BLOCK], tl.float64)
    for first in range(0, V, BLOCK):
        x, ids = _tile(logits, row, row_stride, temperature, first, V, BLOCK)
        ranks = rank_of(x, ids)
        is_in = (ranks >= low) & (x > float("-inf"))
        counts += is_in.to(tl.int32)
        masses += tl.where(is_in & (ranks >= least_rank), tl.exp(x - top.to(tl.float32)), 0.0).to(tl.float64)
    return tl.sum(counts, 0), tl.sum(masses, 0)


@triton.jit
def _measure_listed(listed, low, least_rank, top):
    """The same of listed ranks."""
    is_in = listed >= low
    weights = tl.exp((value_of(listed) - top.to(tl.float32)).to(tl.float64))
    return tl.sum(is_in.to(tl.int32), 0), tl.sum(tl.where(is_in & (listed >= least_rank), weights, 0.0), 0)


@triton.jit
def _middle(low, high):
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def _search(
    listed, is_listed, at, logits, row, row_stride, temperature, V, low, high, least_rank, k, goal, top,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """The highest rank from which upwards there are `k` tokens, or the mass `goal`. It is in [low, high).

    Where the tokens in question are not listed, the row is gone through until they are few enough to be.
    """
    below = tl.zeros([], tl.int32)  # tokens from `high` upwards, and their mass
    mass_above = tl.zeros([], tl.float64)
    count = V
    if not is_listed:
        while (count - below > CAPACITY) & (low + 1 < high):
            middle = _middle(low, high)
            c, held = _measure(logits, row, row_stride, temperature, V, middle, least_rank, top, BLOCK)
            is_enough = held >= goal if BY_MASS else c >= k
            low, count = tl.where(is_enough, middle, low), tl.where(is_enough, c, count)
            high, below = tl.where(is_enough, high, middle), tl.where(is_enough, below, c)
            mass_above = tl.where(is_enough, mass_above, held)
        num = tl.zeros([], tl.int32)
        for first in range(0, V, BLOCK):
            x, ids = _tile(logits, row, row_stride, temperature, first, V, BLOCK)
            ranks = rank_of(x, ids)
            is_in = (ranks >= low) & (ranks < high) & (x > float("-inf"))
            place = num + tl.cumsum(is_in.to(tl.int32), 0) - 1
            tl.store(at + place, ranks, mask=is_in & (place < CAPACITY))
            num += tl.sum(is_in.to(tl.int32), 0)
        tl.debug_barrier()
        lane = tl.arange(0, CAPACITY)
        listed = tl.load(at + lane, mask=lane < num, other=_LOWEST, cache_modifier=".cg")
    count_above, listed_above = below, mass_above
    while (count - below != 1) & (low + 1 < high):
        middle = _middle(low, high)
        c, held = _measure_listed(listed, middle, least_rank, top)
        c += count_above
        is_enough = held + listed_above >= goal if BY_MASS else c >= k
        low, count = tl.where(is_enough, middle, low), tl.where(is_enough, c, count)
        high, below = tl.where(is_enough, high, middle), tl.where(is_enough, below, c)
    return low


@triton.jit
def _threshold_kernel(
    logits, num_nodes, temperature, top_k, top_p, min_p, limits, floor, mass, ranks, gathered, arrived,
    row_stride, N, V, BLOCK: tl.constexpr, LEAST: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Grid (splits, B * N)."""
    split, row, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    b = row // N
    t, k, p, least = tl.load(temperature + b), tl.load(top_k + b), tl.load(top_p + b), tl.load(min_p + b)
    if _is_filtered(t, k, p, least, V, LEAST) & (row % N < tl.load(num_nodes + b)):
        x, ids = _tile(logits, row, row_stride, t, split * BLOCK, V, BLOCK)
        is_in = (order_of(x) >= tl.load(floor + row)) & (x > float("-inf"))
        count = tl.sum(is_in.to(tl.int32), 0)
        if count > 0:
            at = tl.atomic_add(gathered + row, count) + tl.cumsum(is_in.to(tl.int32), 0) - 1
            tl.store(ranks + row * CAPACITY + at, rank_of(x, ids), mask=is_in & (at < CAPACITY))
        tl.debug_barrier()
        if tl.atomic_add(arrived + row, 1) == splits - 1:
            num = tl.atomic_add(gathered + row, 0)
            lane = tl.arange(0, CAPACITY)
            listed = tl.load(ranks + row * CAPACITY + lane, mask=lane < num, other=_LOWEST, cache_modifier=".cg")
            top, total = (
                tl.load(mass + row * 2, cache_modifier=".cg"),
                tl.load(mass + row * 2 + 1, cache_modifier=".cg"),
            )
            least_listed = tl.load(floor + row).to(tl.int64) << 32  # what is below is not listed, and not kept
            limit = tl.full([], _LOWEST, tl.int64)
            high = (order_of(top.to(tl.float32)).to(tl.int64) + 1) << 32
            has_k = (k > 0) & (k < V)
            is_listed = (num <= CAPACITY) & ((num >= k) | (k >= V))
            at = ranks + row * CAPACITY
            if has_k:
                low = tl.where(is_listed, least_listed, limit)
                limit = _search(
                    listed, is_listed, at, logits, row, row_stride, t, V, low, high, limit, k, total, top,
                    False, BLOCK, CAPACITY,
                )  # fmt: skip
                if is_listed:
                    _, total = _measure_listed(listed, limit, limit, top)
                else:
                    _, total = _measure(logits, row, row_stride, t, V, limit, limit, top, BLOCK)
            if p < 1.0:
                _, held = _measure_listed(listed, limit, limit, top)
                is_listed = is_listed & ((held >= total * p) | has_k)
                low = tl.where(is_listed, tl.maximum(limit, least_listed), limit)
                limit = _search(
                    listed, is_listed, at, logits, row, row_stride, t, V, low, high, limit, k, total * p, top,
                    True, BLOCK, CAPACITY,
                )  # fmt: skip
            if least > 0.0:
                floor32 = top.to(tl.float32) + tl.log(least).to(tl.float32)
                floor32 = tl.where(floor32 == 0.0, 0.0, floor32)
                limit = tl.maximum(limit, order_of(floor32).to(tl.int64) << 32)
            tl.store(limits + row, limit)
            tl.store(gathered + row, 0)
            tl.store(arrived + row, 0)


def find_thresholds(
    logits: Tensor,  # [rows, V]
    num_nodes: Tensor,  # [B] int32
    nodes: int,  # N: rows are node-minor
    settings: DrawSettings,
    w: FilterWorkspace,
) -> None:
    """Writes w.limits for every row; rows without filters get a limit below everything."""
    rows, v = logits.shape
    width = triton.next_power_of_2(v)
    block = min(BLOCK, max(256, width))
    splits = math.ceil(v / block)
    group = max(64 if width > 4096 else 1, width // MAX_PEAKS)
    require(splits <= MAX_SPLITS, "vocab_size", f"vocab_size is {v}, more than {MAX_SPLITS * BLOCK}")
    row_settings = (settings.temperature, settings.top_k, settings.top_p, settings.min_p)
    _survey_kernel[(splits, rows)](
        logits, num_nodes, *row_settings, w.limits, w.peaks, w.partial, w.floor, w.mass, w.arrived, logits.stride(0),
        nodes, v, MAX_SPLITS, block, group, MAX_PEAKS, LEAST_TEMPERATURE, NUCLEUS, num_warps=NUM_WARPS,
    )  # fmt: skip
    _threshold_kernel[(splits, rows)](
        logits, num_nodes, *row_settings, w.limits, w.floor, w.mass, w.ranks, w.gathered, w.arrived, logits.stride(0),
        nodes, v, block, LEAST_TEMPERATURE, CAPACITY, num_warps=NUM_WARPS,
    )  # fmt: skip

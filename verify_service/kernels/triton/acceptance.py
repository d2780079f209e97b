"""The target's draw at every node of a batch of trees, and the walks along the draws, on the device.

A row is split over programs. Each looks at its tokens with float32 noise, and computes the noise of those few that may
be the best in float64 as draftwood.noise does; the last program of a row to finish merges. Filters come before, in
`filters.py`, as one threshold per row: a row without filters sorts nothing, and a greedy row has no noise. Logits that
are no distribution (NaN, plus infinity, nothing but minus infinity) give no token, which is -1.

One program per sequence walks. A walk that is cut by a stop token or by length commits nothing, and its tokens are what
the answer still gets. So does one that comes to a node without a draw, which ends the request.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.kernels.gumbel import NOISE_ERROR, exact_noise, fast_noise, word, words
from draftwood.kernels.rank import rank_of
from verify_service.core.accept import Finish
from verify_service.kernels.arguments import FINISHES, NO_DRAW, DrawSettings, Outcome, TreeMetadata
from verify_service.kernels.triton.filters import LEAST_TEMPERATURE, FilterWorkspace, find_thresholds, scale

MAX_SPLITS = 128  # programs per row
PROGRAMS = 1024  # in all: eight for each multiprocessor of an H200
BLOCK, NUM_WARPS = 2048, 4  # tokens that a program looks at together
_NONE = tl.constexpr(0x7FFFFFFF)
_STOP = tl.constexpr(FINISHES.index(Finish.STOP))
_LENGTH = tl.constexpr(FINISHES.index(Finish.LENGTH))
_NO_DRAW = tl.constexpr(NO_DRAW)


class SampleWorkspace:
    """Scratch memory for `rows` = B * N rows of logits, kept between calls: `arrived` is zero before and after each."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.values = torch.empty(rows, MAX_SPLITS, device=device)  # [rows, MAX_SPLITS] float32
        self.ids = torch.empty(rows, MAX_SPLITS, dtype=torch.int32, device=device)  # [rows, MAX_SPLITS]
        self.arrived = torch.zeros(rows, dtype=torch.int32, device=device)  # [rows]
        self.filters = FilterWorkspace(rows, device)


@triton.jit
def _load(logits, row, row_stride, ids, V):
    return tl.load(logits + row.to(tl.int64) * row_stride + ids, mask=ids < V, other=float("-inf")).to(tl.float32)


@triton.jit
def _rough(x, ids, temperature, noise_at, limit, first, BLOCK: tl.constexpr, HAS_FILTERS: tl.constexpr):
    """Scores of a tile by float32 noise."""
    seed, position = noise_at
    if HAS_FILTERS:
        scaled = scale(x, temperature)
        scaled = tl.where((rank_of(scaled, ids) >= limit) | (x != x), scaled, float("-inf"))  # NaN is not lost
    else:
        scaled = x * (1.0 / temperature)
    return scaled + fast_noise(words(seed, position, first // 4, BLOCK // 4))


@triton.jit
def _exact(logits, row, row_stride, temperature, noise_at, token):
    """The score of one token as the definition has it."""
    seed, position = noise_at
    x = tl.load(logits + row.to(tl.int64) * row_stride + token).to(tl.float32)
    return scale(x, temperature) + exact_noise(word(seed, position, token))


@triton.jit
def _perturbed(
    logits, row, row_stride, temperature, noise_at, limit, split, splits, V, BLOCK: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
):  # fmt: skip
    """The best token under noise of a program's tiles, and its score.

    Each lane keeps its best rough score and the next. A token may win if its rough score is within the error of the
    best one; mostly there is one such token. Where a lane has two, its tiles are gone through once more.
    """
    lane = tl.arange(0, BLOCK)
    first_best = tl.full([BLOCK], float("-inf"), tl.float32)
    second = tl.full([BLOCK], float("-inf"), tl.float32)
    held = tl.full([BLOCK], _NONE, tl.int32)
    for first in range(split * BLOCK, V, splits * BLOCK):
        ids = first + lane
        x = _load(logits, row, row_stride, ids, V)
        rough = _rough(x, ids, temperature, noise_at, limit, first, BLOCK, HAS_FILTERS)
        second = tl.maximum(second, tl.minimum(rough, first_best))
        held = tl.where(rough > first_best, ids, held)
        first_best = tl.maximum(first_best, rough, propagate_nan=tl.PropagateNan.ALL)
    top = tl.max(first_best, 0)
    least = top - (2.5 * NOISE_ERROR + (tl.abs(top) + 32.0) * 9.5367431640625e-07)
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], _NONE, tl.int32)
    is_near = (first_best >= least) & (first_best > float("-inf"))
    if tl.max(second, 0) >= least:  # infinite ones compare as NaN or as minus infinity with itself
        for first in range(split * BLOCK, V, splits * BLOCK):
            ids = first + lane
            x = _load(logits, row, row_stride, ids, V)
            rough = _rough(x, ids, temperature, noise_at, limit, first, BLOCK, HAS_FILTERS)
            is_open = (rough >= least) & (rough > float("-inf"))
            candidate = tl.min(tl.where(is_open, ids, _NONE), 0)
            while candidate != _NONE:
                score = _exact(logits, row, row_stride, temperature, noise_at, candidate)
                token = tl.where(score > best, candidate, token)
                best = tl.maximum(best, score)
                candidate = tl.min(tl.where(is_open & (ids > candidate), ids, _NONE), 0)
    else:
        candidate = tl.min(tl.where(is_near, held, _NONE), 0)
        while candidate != _NONE:
            score = _exact(logits, row, row_stride, temperature, noise_at, candidate)
            token = tl.where(score > best, candidate, token)
            best = tl.maximum(best, score)
            candidate = tl.min(tl.where(is_near & (held > candidate), held, _NONE), 0)
    return _checked(best, token, first_best)


@triton.jit
def _checked(best, token, peak):
    """What wins over everything, and is no token, where a lane's largest score is plus infinity, or one was NaN."""
    broken = tl.min((peak < float("inf")).to(tl.int32), 0) == 0
    return tl.where(broken, float("inf"), best), tl.where(broken, -1, token)


@triton.jit
def _greedy(logits, row, row_stride, split, splits, V, BLOCK: tl.constexpr):
    """The largest logit of a program's tiles, and the lowest token that has it."""
    lane = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    held = tl.full([BLOCK], _NONE, tl.int32)
    for first in range(split * BLOCK, V, splits * BLOCK):
        x = _load(logits, row, row_stride, first + lane, V)
        held = tl.where(x > largest, first + lane, held)
        largest = tl.maximum(largest, x, propagate_nan=tl.PropagateNan.ALL)
    best = tl.max(largest, 0)
    return _checked(best, tl.min(tl.where(largest == best, held, _NONE), 0), largest)


@triton.jit
def _sample_kernel(
    logits, positions, num_nodes, temperature, seed, limits, values, chosen, arrived, tokens,
    row_stride, N, V, MAX_SPLITS: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr, HAS_FILTERS: tl.constexpr,
):  # fmt: skip
    """Grid (splits, B * N). logits [B * N, V]; limits [B * N] int64, the least rank that a filter lets through."""
    split, row, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    b = row // N
    if row % N < tl.load(num_nodes + b):
        t = tl.load(temperature + b)
        if t < LEAST:
            best, token = _greedy(logits, row, row_stride, split, splits, V, BLOCK)
        else:
            limit = tl.full([], 0, tl.int64)
            if HAS_FILTERS:
                limit = tl.load(limits + row)
            noise_at = tl.load(seed + b), tl.load(positions + row) + 1
            best, token = _perturbed(
                logits, row, row_stride, t, noise_at, limit, split, splits, V, BLOCK, HAS_FILTERS
            )  # fmt: skip
        tl.store(values + row * MAX_SPLITS + split, best)
        tl.store(chosen + row * MAX_SPLITS + split, token)
        if tl.atomic_add(arrived + row, 1) == splits - 1:
            lane = tl.arange(0, MAX_SPLITS)
            m = lane < splits
            value = tl.load(values + row * MAX_SPLITS + lane, mask=m, other=float("-inf"), cache_modifier=".cg")
            offered = tl.load(chosen + row * MAX_SPLITS + lane, mask=m, other=_NONE, cache_modifier=".cg")
            winner = tl.min(tl.where(value == tl.max(value, 0), offered, _NONE), 0)
            tl.store(tokens + row, tl.where(winner < V, winner, -1))
            tl.store(arrived + row, 0)
    elif split == 0:
        tl.store(tokens + row, 0)


class Sample:
    """The launcher. It keeps a workspace per number of rows, since captured graphs hold on to it."""

    def __init__(self) -> None:
        self.workspace = functools.cache(SampleWorkspace)

    def __call__(
        self, logits: Tensor, tree: TreeMetadata, settings: DrawSettings, drawn: Tensor, *, has_filters: bool
    ) -> None:
        """Rows of logits must be contiguous. Without filters their kernels are not launched."""
        b, n, v = logits.shape
        rows = b * n
        workspace = self.workspace(rows, logits.device)
        block = min(BLOCK, max(256, triton.next_power_of_2(v)))
        splits = min(math.ceil(v / block), MAX_SPLITS, max(1, PROGRAMS // rows))
        flat = logits.view(rows, v)
        if has_filters:
            find_thresholds(flat, tree.num_nodes, n, settings, workspace.filters)
        _sample_kernel[(splits, rows)](
            flat, tree.positions, tree.num_nodes, settings.temperature, settings.seeds, workspace.filters.limits,
            workspace.values, workspace.ids, workspace.arrived, drawn, flat.stride(0), n, v, MAX_SPLITS, block,
            LEAST_TEMPERATURE, has_filters, num_warps=NUM_WARPS,
        )  # fmt: skip


@triton.jit
def _accept_walk_kernel(
    input_ids, parents, num_nodes, drawn, stop_ids, remaining, path, path_length, tokens, finish,
    N, M, D_PATH: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Grid (B,). BN, BM and BD are N, M and D_PATH rounded up to powers of two."""
    b = tl.program_id(0)
    i, m, d = tl.arange(0, BN), tl.arange(0, BM), tl.arange(0, BD)
    tl.store(tokens + b * D_PATH + d, -1, mask=d < D_PATH)
    tl.store(path + b * D_PATH + d, 0, mask=d < D_PATH)
    tl.debug_barrier()
    nodes, left = tl.load(num_nodes + b), tl.load(remaining + b)
    is_child = (i > 0) & (i < nodes)
    parent = tl.load(parents + b * N + i, mask=is_child, other=-1)
    carried = tl.load(input_ids + b * N + i, mask=is_child, other=-1).to(tl.int32)
    stops = tl.load(stop_ids + b * M + m, mask=m < M, other=-1)
    node = tl.where(nodes > 0, 0, -1)
    count = tl.zeros([], tl.int32)
    code = tl.zeros([], tl.int32)
    while (node >= 0) & (count < D_PATH):
        token = tl.load(drawn + b * N + node)
        tl.store(path + b * D_PATH + count, node)
        tl.store(tokens + b * D_PATH + count, token)
        count += 1
        is_stop = tl.max((stops == token).to(tl.int32), 0) > 0
        code = tl.where(token < 0, _NO_DRAW, tl.where(is_stop, _STOP, tl.where(count >= left, _LENGTH, 0)))
        child = tl.max(tl.where((parent == node) & (carried == token), i, -1), 0)
        node = tl.where(code > 0, -1, child)
    tl.store(path_length + b, tl.where(code > 0, 0, count))
    tl.store(finish + b, code)


def accept_walk(input_ids: Tensor, tree: TreeMetadata, drawn: Tensor, settings: DrawSettings, outcome: Outcome) -> None:
    b, n = input_ids.shape
    m, d = settings.stop_ids.shape[1], outcome.path.shape[1]
    _accept_walk_kernel[(b,)](
        input_ids, tree.parents, tree.num_nodes, drawn, settings.stop_ids, settings.remaining,
        outcome.path, outcome.path_length, outcome.tokens, outcome.finish, n, m, d,
        triton.next_power_of_2(n), triton.next_power_of_2(m), triton.next_power_of_2(d), num_warps=1,
    )  # fmt: skip

"""The likeliest tokens of every depth of a block, with log-probabilities over the whole vocabulary, on the device.

    score = log_softmax(log q + T Gumbel(seed, position))      T = 0: the drafter's own log-probability

A tile of BLOCK tokens gives a peak for each of its LANES lanes, which hold every LANES-th token. The `width` largest
peaks are a floor under the `width` likeliest tokens, and only their lanes, at most width * BLOCK / LANES tokens, hold
any of them: so a row is read once, and ranked by counting. Ties go to the lower id. Noise is float32's, since a ranking
only guesses what the target will draw.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from draft_service.kernels.arguments import Candidates, TreeSettings
from draftwood.errors import UnsupportedModelError
from draftwood.kernels.gumbel import fast_noise, word, words
from draftwood.kernels.rank import rank_of, value_of
from draftwood.tree import MAX_WIDTH

BLOCK, LANES = 4096, 64
MAX_TILES = 64
_LOWEST = tl.constexpr(-(2**63) + 1)


@dataclass(frozen=True, slots=True)
class LikeliestWorkspace:
    """Scratch memory, kept between calls."""

    peaks: Tensor  # [rows, MAX_TILES * LANES] int64
    sums: Tensor  # [rows, 4, MAX_TILES] float32: largest value and mass of a tile, with noise and without
    lanes: Tensor  # [rows, MAX_WIDTH] int32
    ranks: Tensor  # [rows, MAX_WIDTH * BLOCK / LANES] int64


def likeliest_workspace(rows: int, device: torch.device) -> LikeliestWorkspace:
    """For at most `rows` = sequences * depths."""
    return LikeliestWorkspace(
        torch.empty(rows, MAX_TILES * LANES, dtype=torch.int64, device=device),
        torch.empty(rows, 4, MAX_TILES, device=device),
        torch.empty(rows, MAX_WIDTH, dtype=torch.int32, device=device),
        torch.empty(rows, MAX_WIDTH * BLOCK // LANES, dtype=torch.int64, device=device),
    )


@triton.jit
def _rank(value, ids):
    return rank_of(tl.where(value == 0.0, 0.0, value), ids)


@triton.jit
def _mass(x, largest):
    return tl.sum(tl.where(x > float("-inf"), tl.exp(x - largest), 0.0), 0)


@triton.jit
def _survey_kernel(
    logits, temperature, seed, base_lengths, peaks, sums,
    row_stride, DEPTHS, V, BLOCK: tl.constexpr, LANES: tl.constexpr, MAX_TILES: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, S * DEPTHS)."""
    tile, row = tl.program_id(0), tl.program_id(1)
    s = row // DEPTHS
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * row_stride + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    t = tl.load(temperature + s)
    ranked = x
    if t > 0.0:
        position = tl.load(base_lengths + s) + row % DEPTHS + 1
        ranked = x + t * fast_noise(words(tl.load(seed + s), position, tile * (BLOCK // 4), BLOCK // 4))
    own, noisy = tl.max(x, 0), tl.max(ranked, 0)
    at = sums + row * 4 * MAX_TILES + tile
    tl.store(at, noisy)
    tl.store(at + MAX_TILES, _mass(ranked, noisy))
    tl.store(at + 2 * MAX_TILES, own)
    tl.store(at + 3 * MAX_TILES, _mass(x, own))
    best = tl.max(tl.reshape(_rank(ranked, ids), [BLOCK // LANES, LANES]), 0)
    tl.store(peaks + row * MAX_TILES * LANES + tile * LANES + tl.arange(0, LANES), best)


@triton.jit
def _log_sum_exp(at, tiles, MAX_TILES: tl.constexpr):
    lane = tl.arange(0, MAX_TILES)
    heads = tl.load(at + lane, mask=lane < tiles, other=float("-inf"))
    sums = tl.load(at + MAX_TILES + lane, mask=lane < tiles, other=0.0)
    top = tl.max(heads, 0)
    return top + tl.log(tl.sum(tl.where(heads > float("-inf"), sums * tl.exp(heads - top), 0.0), 0))


@triton.jit
def _select_kernel(
    logits, temperature, seed, base_lengths, peaks, sums, lanes, ranks, token_ids, scores, log_probs,
    row_stride, DEPTHS, V, WIDTH, tiles, BLOCK: tl.constexpr, LANES: tl.constexpr, MAX_TILES: tl.constexpr,
    MAX_WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (S * DEPTHS,)."""
    row = tl.program_id(0)
    s = row // DEPTHS
    i = tl.arange(0, MAX_TILES * LANES)
    held = tl.load(peaks + row * MAX_TILES * LANES + i, mask=i < tiles * LANES, other=_LOWEST)
    low = tl.min(held, 0)
    high = tl.max(held, 0) + 1
    count = tiles * LANES
    while (count != WIDTH) & (low + 1 < high):  # at least WIDTH peaks are not below `low`
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        c = tl.sum((held >= middle).to(tl.int32), 0)
        low = tl.where(c >= WIDTH, middle, low)
        count = tl.where(c >= WIDTH, c, count)
        high = tl.where(c >= WIDTH, high, middle)
    is_in = held >= low
    tl.store(lanes + row * MAX_WIDTH + tl.cumsum(is_in.to(tl.int32), 0) - 1, i, mask=is_in)
    tl.debug_barrier()
    DEEP: tl.constexpr = BLOCK // LANES
    j = tl.arange(0, MAX_WIDTH * DEEP)
    lane = tl.load(lanes + row * MAX_WIDTH + j // DEEP, mask=j < WIDTH * DEEP, other=0)
    ids = (lane // LANES) * BLOCK + (j % DEEP) * LANES + lane % LANES
    is_real = (j < WIDTH * DEEP) & (ids < V)
    x = tl.load(logits + row.to(tl.int64) * row_stride + ids, mask=is_real, other=float("-inf")).to(tl.float32)
    t = tl.load(temperature + s)
    if t > 0.0:
        x = x + t * fast_noise(word(tl.load(seed + s), tl.load(base_lengths + s) + row % DEPTHS + 1, ids))
    found = tl.where(is_real, _rank(x, ids), _LOWEST)
    is_in = found >= low
    at = ranks + row * MAX_WIDTH * DEEP
    tl.store(at + tl.cumsum(is_in.to(tl.int32), 0) - 1, found, mask=is_in)
    num = tl.sum(is_in.to(tl.int32), 0)
    tl.debug_barrier()
    noisy = _log_sum_exp(sums + row * 4 * MAX_TILES, tiles, MAX_TILES)
    own = _log_sum_exp(sums + (row * 4 + 2) * MAX_TILES, tiles, MAX_TILES)
    c = tl.arange(0, CHUNK)
    for first in range(0, num, CHUNK):
        mine = tl.load(at + first + c, mask=first + c < num, other=_LOWEST)
        place = tl.zeros([CHUNK], tl.int32)
        for other in range(0, num, CHUNK):
            theirs = tl.load(at + other + c, mask=other + c < num, other=_LOWEST)
            place += tl.sum((theirs[None, :] > mine[:, None]).to(tl.int32), 1)
        is_kept = (place < WIDTH) & (first + c < num)
        token = 0x7FFFFFFF - (mine & 0x7FFFFFFF).to(tl.int32)
        out = row * WIDTH + place
        tl.store(token_ids + out, token, mask=is_kept)
        tl.store(scores + out, value_of(mine) - noisy, mask=is_kept)
        plain = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=is_kept, other=0.0).to(tl.float32)
        tl.store(log_probs + out, plain - own, mask=is_kept)


class Likeliest:
    """The launcher, of one device. It keeps a workspace per number of rows, since captured graphs hold on to it."""

    def __init__(self) -> None:
        self._workspaces: dict[int, LikeliestWorkspace] = {}

    def workspace(self, rows: int, device: torch.device) -> LikeliestWorkspace:
        """The memory of launches over `rows` = S * depths rows of logits."""
        if rows not in self._workspaces:
            self._workspaces[rows] = likeliest_workspace(rows, device)
        return self._workspaces[rows]

    def __call__(
        self,
        logits: Tensor,  # [S, depths, V] float32, bfloat16 or float16, biases added; rows contiguous
        settings: TreeSettings,
        candidates: Candidates,  # written
    ) -> None:
        """Raises UnsupportedModelError for vocabularies or widths beyond what the workspace holds."""
        s, depths, v = logits.shape
        width, tiles = candidates.token_ids.shape[-1], -(-v // BLOCK)
        if tiles > MAX_TILES:
            raise UnsupportedModelError(f"vocab_size is {v}, more than {MAX_TILES * BLOCK}", field="vocab_size")
        if not 1 <= width <= min(MAX_WIDTH, v):
            raise UnsupportedModelError(f"width is {width}, not in [1, {min(MAX_WIDTH, v)}]", field="width")
        flat, w = logits.view(s * depths, v), self.workspace(s * depths, logits.device)
        inputs, stride = (flat, settings.temperature, settings.seeds, settings.base_lengths), flat.stride(0)
        _survey_kernel[(tiles, s * depths)](
            *inputs, w.peaks, w.sums, stride, depths, v, BLOCK, LANES, MAX_TILES, num_warps=8
        )
        _select_kernel[(s * depths,)](
            *inputs, w.peaks, w.sums, w.lanes, w.ranks, candidates.token_ids, candidates.scores, candidates.log_probs,
            stride, depths, v, width, tiles, BLOCK, LANES, MAX_TILES, MAX_WIDTH, 128, num_warps=8,
        )  # fmt: skip

"""How a token is drawn: one definition for both services.

    draw = argmax_v (log p_v + Gumbel(seed, position, v)),   position = that of the token drawn

with p after logit bias, penalties, temperature, top-k, top-p and min-p, in this order; ties go to the lower id. Greedy
decoding is the case without noise. So the output is a function of the target, the parameters and the seed alone, and
any tree is lossless (Daliri, Musco, Suresh, arXiv 2408.07978, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from draftwood.noise import NoiseCache
from draftwood.ranges import check_range

# Below it the noise is finer than what float32 tells apart between logits, and dividing by it overflows.
_LEAST_TEMPERATURE = 1e-5

_NO_BIAS: Mapping[int, float] = {}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings of one request; the defaults are neutral. Raises InvalidRequestError naming the field and the value."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no filter
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)

    def __post_init__(self) -> None:
        check_range("temperature", self.temperature, 0.0, 100.0)
        check_range("top_p", self.top_p, 0.0, 1.0, is_low_open=True)
        check_range("top_k", self.top_k, 0, 2**31 - 1)
        check_range("min_p", self.min_p, 0.0, 1.0)
        check_range("seed", self.seed, 0, 2**64 - 1)
        check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        for bias in self.logit_bias.values():
            check_range("logit_bias", bias, -100.0, 100.0)

    @property
    def is_greedy(self) -> bool:
        """Whether tokens are drawn without noise: at temperature 0, and so close to it that it makes no difference."""
        return self.temperature < _LEAST_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether the draw depends on the tokens before it other than through the target."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """What penalties count: tokens of the prompt, and tokens of the answer along the path of the node drawn at."""

    prompt: frozenset[int] = frozenset()
    answer: Mapping[int, int] = field(default_factory=dict[int, int])


def adjust(
    logits: NDArray[np.float32],  # [vocab_size]
    params: SamplingParams,
    counts: TokenCounts | None = None,
) -> NDArray[np.float32]:  # [vocab_size]
    """Logits after bias and penalties; the same array where nothing applies."""
    if not params.logit_bias and not params.has_penalties:
        return logits
    out = logits.copy()
    for token, bias in params.logit_bias.items():
        out[token] += bias
    if params.has_penalties and counts is not None:
        if params.repetition_penalty != 1.0:
            seen = np.fromiter(counts.prompt | counts.answer.keys(), dtype=np.int64)
            values, factor = out[seen], np.float32(params.repetition_penalty)
            out[seen] = np.where(values > 0, values / factor, values * factor)
        for token, count in counts.answer.items():
            out[token] -= params.presence_penalty + params.frequency_penalty * count
    return out


def filtered(
    logits: NDArray[np.float32],  # [vocab_size], adjusted
    params: SamplingParams,
) -> NDArray[np.float32]:  # [vocab_size]
    """Logits over the temperature, -inf outside the top-k, top-p and min-p sets. The temperature must be positive."""
    scaled = logits / np.float32(params.temperature)
    if params.top_k and params.top_k < scaled.shape[0]:
        scaled = _keep(scaled, _largest(scaled, params.top_k))
    if params.top_p < 1.0:
        scaled = _keep(scaled, _nucleus(scaled, params.top_p))
    if params.min_p > 0.0:
        floor = scaled.max() + np.float32(math.log(params.min_p))
        scaled = np.where(scaled >= floor, scaled, np.float32(-np.inf))
    return scaled


def _largest(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Indices of the `count` largest values, ties to the lower index."""
    threshold = np.partition(values, -count)[-count]
    above = np.flatnonzero(values > threshold)
    ties = np.flatnonzero(values == threshold)[: count - above.shape[0]]
    return np.concatenate([above, ties])


def _nucleus(values: NDArray[np.float32], mass: float) -> NDArray[np.int64]:
    """The fewest most likely tokens whose probabilities add up to at least `mass`, ties to the lower index."""
    probs = np.exp(values.astype(np.float64) - values.max())
    probs /= probs.sum()
    size = min(256, probs.shape[0])
    while True:  # sorting the few that matter costs a tenth of sorting the vocabulary
        head = _largest(values, size)
        order = head[np.lexsort((head, -values[head]))]
        total = np.cumsum(probs[order])
        if total[-1] >= mass or size == probs.shape[0]:
            return order[: int(np.searchsorted(total, mass)) + 1]
        size = min(size * 4, probs.shape[0])


def _keep(values: NDArray[np.float32], kept: NDArray[np.int64]) -> NDArray[np.float32]:
    out = np.full_like(values, -np.inf)
    out[kept] = values[kept]
    return out


def draw(
    logits: NDArray[np.float32],  # [vocab_size]
    params: SamplingParams,
    position: int,
    noise: NoiseCache,
    counts: TokenCounts | None = None,
) -> int:
    """The token at `position`, given the target's logits for it."""
    logits = adjust(logits, params, counts)
    if params.is_greedy:
        return int(logits.argmax())
    return int((filtered(logits, params) + noise.row(params.seed, position)).argmax())


def derived_seed(seed: int, index: int) -> int:
    """Seed of sample `index` of a request with several; sample 0 keeps the request's own (SplitMix64 finaliser)."""
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return mixed ^ (mixed >> 31)

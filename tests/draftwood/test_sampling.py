"""Noise and draws: known answers, distribution, order of the filters, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftwood.errors import InvalidRequestError
from draftwood.noise import NoiseCache, gumbel, philox
from draftwood.sampling import SamplingParams, TokenCounts, adjust, derived_seed, draw, filtered

Logits = NDArray[np.float32]


def test_philox_known_answer() -> None:
    # Random123's known-answer test of Philox4x32-10 with a zero counter and key.
    assert [int(word) for word in philox(0, 0, 4)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**20), st.integers(1, 70))
def test_noise_is_a_function_of_seed_position_and_token(seed: int, position: int, size: int) -> None:
    longer = gumbel(seed, position, size + 5)
    assert np.array_equal(gumbel(seed, position, size), longer[:size])
    assert np.isfinite(longer).all()


def test_noise_is_gumbel() -> None:
    values = np.concatenate([gumbel(5, p, 4096).astype(np.float64) for p in range(16)])
    assert abs(values.mean() - np.euler_gamma) < 0.02
    assert abs(values.std() - math.pi / math.sqrt(6)) < 0.02


def test_noise_cache_keeps_the_latest() -> None:
    cache = NoiseCache(8, capacity=2)
    first = cache.row(1, 1)
    cache.row(1, 2)
    assert cache.row(1, 1) is first
    cache.row(1, 3)
    assert cache.row(1, 1) is first
    assert cache.row(1, 2) is not None
    assert len(cache._rows) == 2


def test_draws_follow_the_distribution() -> None:
    """Chi-squared over a tiny vocabulary: 20,000 positions, 5 tokens, 4 degrees of freedom."""
    logits = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05], np.float32))
    params, cache = SamplingParams(temperature=1.0, seed=11), NoiseCache(5, capacity=4)
    n = 20_000
    counts = np.bincount([draw(logits, params, p, cache) for p in range(n)], minlength=5)
    expected = n * np.exp(logits.astype(np.float64))
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # p = 0.001


def test_greedy_takes_the_lower_id_of_a_tie() -> None:
    assert draw(np.array([0.0, 2.0, 2.0], np.float32), SamplingParams(), 0, NoiseCache(3)) == 1


def reference_filter(logits: Logits, params: SamplingParams) -> set[int]:
    """The kept tokens, by the book."""
    scaled = logits.astype(np.float64) / params.temperature
    order = sorted(range(len(scaled)), key=lambda i: (-np.float32(scaled[i]), i))
    if params.top_k:
        order = order[: params.top_k]
    probs = np.exp(scaled[order] - scaled[order].max())
    probs /= probs.sum()
    if params.top_p < 1:
        size = int(np.searchsorted(np.cumsum(probs), params.top_p)) + 1
        order = order[:size]
    best = scaled[order[0]]
    return {i for i in order if params.min_p == 0 or scaled[i] >= best + math.log(params.min_p) - 1e-9}


@given(
    st.integers(0, 1000),
    st.sampled_from([0, 1, 3, 50, 700]),
    st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.05]),
)
def test_filters_keep_what_the_definition_keeps(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    logits = (np.random.default_rng(seed).standard_normal(600) * 2).astype(np.float32)
    params = SamplingParams(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = set(np.flatnonzero(np.isfinite(filtered(logits, params))).tolist())
    assert kept == reference_filter(logits, params)


def test_penalties_and_bias() -> None:
    logits = np.array([1.0, -1.0, 2.0, 0.0], np.float32)
    counts = TokenCounts(prompt=frozenset({0}), answer={1: 2})
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={3: 4.0})
    assert adjust(logits, params, counts).tolist() == [0.5, -3.0, 2.0, 4.0]
    assert logits.tolist() == [1.0, -1.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("min_p", 2.0),
        ("seed", -1),
        ("seed", 2**64),
        ("presence_penalty", 2.5),
        ("repetition_penalty", 0.0),
    ],
)
def test_bad_settings_name_the_field_and_the_value(field: str, value: float) -> None:
    with pytest.raises(InvalidRequestError, match=f"{field} is {value}") as caught:
        SamplingParams(**{field: value})  # pyright: ignore[reportArgumentType]
    assert caught.value.field == field


def test_derived_seeds_differ() -> None:
    assert derived_seed(9, 0) == 9
    assert len({derived_seed(9, i) for i in range(100)}) == 100


@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 3e-38, 1e-10])
def test_temperatures_too_small_to_divide_by_are_greedy(temperature: float) -> None:
    logits = np.random.default_rng(0).normal(size=50).astype(np.float32) * 20
    params = SamplingParams(temperature=temperature, seed=3)
    assert draw(logits, params, 7, NoiseCache(50)) == int(logits.argmax())

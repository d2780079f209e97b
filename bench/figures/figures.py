"""Figures out of measured rounds: medians, intervals, ratios within rounds, acceptance by depth. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from bench.figures.values import SHADOW, Configuration, Stats

STAGES = ("draft", "tree", "verify", "accept", "commit")
RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One configuration in one round: all prompts once."""

    num_answers: int
    num_tokens: int  # the first token of each answer included
    seconds: float  # alone: first token to last, added up; several at once: the round's wall time
    wall_s: float  # of the round, prefill included
    stats: Stats

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first of each answer, over the time that they took."""
        return (self.num_tokens - self.num_answers) / self.seconds if self.seconds > 0 else 0.0

    @property
    def throughput(self) -> float:
        """All tokens over wall time: the same for any number at once."""
        return self.num_tokens / self.wall_s if self.wall_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is reported of one configuration."""

    configuration: str
    tokens_per_s: float
    tokens_per_s_interval: tuple[float, float]
    ratio_to_none: float | None
    ratio_to_none_interval: tuple[float, float] | None
    ratio_to_linear: float | None
    num_tokens: int  # per round
    num_steps: int  # per round
    tokens_per_step: float
    shadow_tokens_per_step: float | None  # what the tree would have given beside the chain
    drafted_per_step: float
    acceptance_by_depth: tuple[float, ...]
    ms_per_step: float
    stage_ms: dict[str, float]  # per step
    transport_p50_ms: float | None
    fallback_steps: int
    rounds_tokens_per_s: tuple[float, ...]
    throughput: float  # tokens/s of wall time, prefill and first tokens included
    throughput_interval: tuple[float, float]


def bootstrap_interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """Percentile interval of the median at CONFIDENCE, by resampling rounds with replacement."""
    data = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, data.shape[0], (RESAMPLES, data.shape[0]))
    medians = np.median(data[picks], axis=1)
    tail = (1 - CONFIDENCE) / 2 * 100
    low, high = np.percentile(medians, [tail, 100 - tail])
    return float(low), float(high)


def round_ratios(samples: Sequence[Sample], baseline: Sequence[Sample]) -> list[float]:
    """Speed over the baseline's in the same round, so that what slows a whole round down cancels out."""
    pairs = zip(samples, baseline, strict=True)
    return [sample.tokens_per_s / base.tokens_per_s for sample, base in pairs if base.tokens_per_s > 0]


def acceptance_by_depth(stats: Stats) -> tuple[float, ...]:
    """For each depth from 1 on: of the drafted steps whose tree reached it, the share that accepted that deep."""
    rates: list[float] = []
    for depth, reached in enumerate(stats.drafted_by_depth, start=1):
        if reached == 0:
            break
        rates.append(sum(stats.accepted_histogram[depth:]) / reached)
    return tuple(rates)


def summarise(
    name: str, samples: Sequence[Sample], *, none: Sequence[Sample] | None, linear: Sequence[Sample] | None = None
) -> Row:
    """One configuration's row; `none` and `linear` are what it is compared with."""
    speeds = [sample.tokens_per_s for sample in samples]
    throughputs = [sample.throughput for sample in samples]
    total = sum((sample.stats for sample in samples), Stats())
    rounds = len(samples)
    tokens = sum(sample.num_tokens - sample.num_answers for sample in samples)
    steps = max(total.num_steps, 1)
    ratios = [] if none is None else round_ratios(samples, none)
    to_linear = [] if linear is None else round_ratios(samples, linear)
    return Row(
        configuration=name,
        tokens_per_s=median(speeds),
        tokens_per_s_interval=bootstrap_interval(speeds),
        ratio_to_none=median(ratios) if ratios else None,
        ratio_to_none_interval=bootstrap_interval(ratios) if ratios else None,
        ratio_to_linear=median(to_linear) if to_linear else None,
        num_tokens=round(tokens / rounds),
        num_steps=round(total.num_steps / rounds),
        tokens_per_step=tokens / steps,
        shadow_tokens_per_step=_shadow(name, total, tokens / steps),
        drafted_per_step=total.num_drafted_tokens / steps,
        acceptance_by_depth=acceptance_by_depth(total),
        ms_per_step=total.decode_us / 1000 / steps,
        stage_ms={stage: getattr(total, f"{stage}_us") / 1000 / steps for stage in STAGES},
        transport_p50_ms=median(total.transport_p50_us) / 1000 if total.transport_p50_us else None,
        fallback_steps=total.num_fallback_steps,
        rounds_tokens_per_s=tuple(speeds),
        throughput=median(throughputs),
        throughput_interval=bootstrap_interval(throughputs),
    )


def _shadow(name: str, total: Stats, tokens_per_step: float) -> float | None:
    """The tree's nodes in place of the chain's; the bonus tokens are the same."""
    if name.partition(" ")[0] != SHADOW:
        return None
    return tokens_per_step + (total.shadow_tree_tokens - total.num_accepted_tokens) / max(total.num_steps, 1)


def rows(samples: dict[Configuration, list[Sample]]) -> list[Row]:
    """One row per configuration, compared with plain decoding and with the fastest chain where they were measured."""
    none = next((found for key, found in samples.items() if key.algorithm == "none"), None)
    chains = [found for key, found in samples.items() if key.algorithm == "dflash"]
    linear = max(chains, key=lambda found: median(sample.tokens_per_s for sample in found), default=None)
    return [summarise(key.name, found, none=none, linear=linear) for key, found in samples.items()]

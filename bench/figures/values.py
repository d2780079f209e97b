"""What a measurement is of and what it gives: configurations, answers and their figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest

SHADOW = "shadow"


@dataclass(frozen=True)
class Configuration:
    """A way to decode: an algorithm and its budget in nodes without the root. `shadow` is a chain with the tree
    verified beside it."""

    algorithm: str
    tree_budget: int = 0

    @property
    def name(self) -> str:
        """As tables and plots call it."""
        return self.algorithm if self.tree_budget == 0 else f"{self.algorithm} {self.tree_budget}"


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Figures of one answer, or of several added up."""

    num_steps: int = 0
    num_drafted_steps: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_fallback_steps: int = 0
    shadow_tree_tokens: int = 0
    decode_us: int = 0
    prefill_us: int = 0
    queue_us: int = 0
    draft_us: int = 0
    tree_us: int = 0
    verify_us: int = 0
    accept_us: int = 0
    commit_us: int = 0
    drafter_busy_us: int = 0
    accepted_histogram: tuple[int, ...] = ()  # entry d: steps that accepted exactly d
    drafted_by_depth: tuple[int, ...] = ()  # entry d: drafted steps whose tree reached depth d + 1
    transport_p50_us: tuple[int, ...] = ()  # one per answer

    def __add__(self, other: Stats) -> Stats:
        return Stats(
            **{name: getattr(self, name) + getattr(other, name) for name in scalars(Stats)},
            accepted_histogram=_add(self.accepted_histogram, other.accepted_histogram),
            drafted_by_depth=_add(self.drafted_by_depth, other.drafted_by_depth),
            transport_p50_us=self.transport_p50_us + other.transport_p50_us,
        )


def scalars(kind: type[Stats]) -> list[str]:
    """Names of the fields that are whole numbers."""
    return [spec.name for spec in fields(kind) if spec.default == 0]


def _add(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))


@dataclass(frozen=True)
class Answer:
    """One decoded prompt; `token_ids` include the stop token."""

    token_ids: tuple[int, ...]
    stats: Stats


@dataclass(frozen=True, kw_only=True)
class Target:
    """What the verify service says of itself."""

    model_id: str
    model_type: str
    dtype: str
    tokenizer_hash: str
    max_tree_budget: int
    max_batch: int
    drafter_status: str
    draft_model_id: str


@dataclass(frozen=True)
class Judgement:
    """What the reference says at one position of somebody's answer, given all tokens before it."""

    best_id: int
    best: float  # the best logit
    second: float  # the second-best one
    chosen: float  # that of the token in the answer

"""What a message brings and wants for one sequence, and what it gets: values, which api/codec.py has messages of."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from draft_service.draft.candidates import Candidates
from draftwood.sampling import SamplingParams
from draftwood.tree import DraftTree
from draftwood.tree_options import TreeOptions


class RefusalReason(Enum):
    """Why a sequence got no tree."""

    CACHE_FULL = "cache_full"
    CONTEXT_INCOMPLETE = "context_incomplete"
    UNSUPPORTED = "unsupported"
    DEADLINE = "deadline"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class Refusal:
    """No tree, and why. `context_length`: rows that the cache holds, for CONTEXT_INCOMPLETE."""

    reason: RefusalReason
    message: str
    context_length: int = 0


@dataclass(frozen=True, slots=True)
class Drafted:
    """A tree, and the likeliest tokens of every depth when they were asked for."""

    tree: DraftTree
    candidates: Candidates | None = None


@dataclass(frozen=True, slots=True)
class ContextRows:
    """Feature rows of committed tokens, from position `start` on."""

    start: int
    features: Tensor  # [n, H]


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """What one message brings and wants for one sequence; without `tree` it only brings context."""

    sequence_id: int
    epoch: int
    base_length: int
    root: int
    context: ContextRows | None = None
    tree: TreeOptions | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(slots=True)
class StepOutcome:
    """One result per step, None where only context came; times in seconds."""

    results: list[Drafted | Refusal | None]
    draft_s: float = 0.0
    tree_s: float = 0.0

"""What goes to and comes from a drafter in one step: values, turned into messages by the draft client only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from draftwood.sampling import SamplingParams
from draftwood.tree import DraftTree


class RefusalReason(Enum):
    """Why a sequence got no tree."""

    CACHE_FULL = "cache_full"
    CONTEXT_INCOMPLETE = "context_incomplete"
    UNSUPPORTED = "unsupported"
    DEADLINE = "deadline"
    INVALID = "invalid"
    MALFORMED = "malformed"
    STALE = "stale"


class Fallback(Enum):
    """Why a step that wanted a draft had none, where the drafter was not even asked or did not answer."""

    ABSENT = "absent"  # no link to a drafter
    BUSY = "busy"  # the answer to an earlier step is still outstanding
    TIMEOUT = "timeout"
    DISCONNECT = "disconnect"  # the link broke while it was waited for
    PREFILL = "prefill"  # its context is on the way
    UNDRAFTABLE = "undraftable"  # this drafter refused the sequence for good
    EMPTY = "empty"  # a tree without nodes came


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """What the connected drafter said."""

    model_id: str
    max_depth: int
    context_window: int
    max_context: int


@dataclass(frozen=True, slots=True)
class ContextRows:
    """Committed tokens with their feature rows."""

    start: int
    token_ids: tuple[int, ...]  # [P]
    features: bytes  # [P, F], little-endian
    is_bfloat16: bool  # else float32


@dataclass(frozen=True, slots=True)
class DraftJob:
    """One sequence's part of a step: the commit of the step before, and the tree wanted."""

    sequence_id: int
    epoch: int
    base_length: int
    root: int
    context: ContextRows | None
    algorithm: str
    tree_budget: int
    width_cap: int
    spine: bool
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """A tree, or why there is none."""

    tree: DraftTree | None
    refused: RefusalReason | None = None
    message: str = ""
    context_length: int = 0  # for CONTEXT_INCOMPLETE: rows that the drafter holds


@dataclass(frozen=True, slots=True)
class DraftAnswer:
    """Outcomes by sequence id, and the drafter's own time in seconds."""

    outcomes: dict[int, DraftOutcome]
    busy: float

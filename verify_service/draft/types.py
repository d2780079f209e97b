"""What goes to and comes from a drafter in one step, as values; codec.py has their messages."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from draftwood.sampling import SamplingParams
from draftwood.tree import DraftTree
from draftwood.tree_options import TreeOptions


class RefusalReason(Enum):
    """Why an answer has no tree for a sequence: the drafter's reasons, and what the check of its tree found."""

    CACHE_FULL = "cache_full"
    CONTEXT_INCOMPLETE = "context_incomplete"
    UNSUPPORTED = "unsupported"
    DEADLINE = "deadline"
    INVALID = "invalid"
    MALFORMED = "malformed"
    STALE = "stale"


class Fallback(Enum):
    """Why a step that wanted a draft had none, where the drafter was not even asked or did not answer."""

    ABSENT = "absent"  # no stream to a drafter
    BUSY = "busy"  # the answer to an earlier step is still outstanding
    TIMEOUT = "timeout"
    DISCONNECT = "disconnect"  # the stream broke while its answer was waited for
    PREFILL = "prefill"  # the sequence's context is on the way
    UNDRAFTABLE = "undraftable"  # this drafter refused the sequence for good
    EMPTY = "empty"  # a tree without nodes came


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """What the connected drafter said in the handshake."""

    model_id: str
    vocab_size: int
    max_depth: int
    context_window: int


@dataclass(frozen=True, slots=True)
class ContextRows:
    """Feature rows of committed tokens, from position `start` on."""

    start: int
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
    tree: TreeOptions
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Refusal:
    """No tree, and why. `context_length`: rows that the drafter holds, for CONTEXT_INCOMPLETE."""

    reason: RefusalReason
    message: str = ""
    context_length: int = 0


@dataclass(frozen=True, slots=True)
class DraftAnswer:
    """A checked answer: a tree or a refusal for every job. Times are in seconds."""

    outcomes: dict[int, DraftTree | Refusal]  # by sequence id
    busy_s: float  # in the drafter, by its own clock
    transport_s: float  # from the sending of the step to its answer, less the drafter's time


@dataclass(slots=True)
class DroppedResults:
    """Results of a drafter that were not used, since the start. Each field is written by one thread at a time."""

    rejected: int = 0  # the tree was malformed
    mismatched: int = 0  # for another state of the sequence than the one asked about
    late: int = 0  # after the deadline

    @property
    def stale(self) -> int:
        """Results that were of no use any more when they came."""
        return self.mismatched + self.late

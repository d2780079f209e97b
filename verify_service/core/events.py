"""What the engine answers a request with: that it started, its tokens, its end."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood.errors import DraftwoodError
from draftwood.tree import DraftTree
from verify_service.core.accept import Finish
from verify_service.core.stats import StageTimes, Stats


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """Natural-log probabilities at one position, of the target's own distribution."""

    token_id: int
    log_prob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), likeliest first


@dataclass(frozen=True, slots=True)
class Trace:
    """One step of one sequence."""

    base_length: int
    tree: DraftTree
    path: tuple[int, ...]
    times: StageTimes
    shadow_path: tuple[int, ...] = ()  # in shadow-linear mode


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is in the caches."""

    prompt_log_probs: tuple[TokenLogProbs, ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """Newly committed tokens."""

    token_ids: tuple[int, ...]
    log_probs: tuple[TokenLogProbs, ...] = ()
    trace: Trace | None = None
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer."""

    reason: Finish
    stop_token_id: int | None
    stats: Stats


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended with an error."""

    error: DraftwoodError


Event = Started | Tokens | Finished | Failed

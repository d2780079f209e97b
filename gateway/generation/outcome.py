"""How an answer ended and what it cost, in the verify service's figures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Figures of one answer. None: not known, because the gateway cancelled the call before its end (a stop string).
    The counts are then those of the steps up to the cut, the step that holds it as a whole."""

    num_steps: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_fallback_steps: int | None = None
    draft_ms: float | None = None
    tree_ms: float | None = None
    verify_ms: float | None = None
    accept_ms: float | None = None
    commit_ms: float | None = None
    transport_p50_ms: float | None = None
    prefill_ms: float | None = None
    queue_ms: float | None = None
    decode_ms: float | None = None

    def with_step(self, num_drafted_tokens: int, num_accepted_tokens: int) -> Self:
        """The figures with one more step's."""
        return replace(
            self,
            num_steps=self.num_steps + 1,
            num_drafted_tokens=self.num_drafted_tokens + num_drafted_tokens,
            num_accepted_tokens=self.num_accepted_tokens + num_accepted_tokens,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one choice ended. `num_step_tokens` are the tokens of its steps: all but the one that the prefill gave."""

    finish_reason: str
    num_tokens: int
    num_step_tokens: int
    stats: Stats

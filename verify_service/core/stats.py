"""Figures of one request, and the stage times of one step, which they sum."""

from __future__ import annotations

from dataclasses import dataclass, field

from draftwood.tree import DraftTree


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds in the stages of one step, for the whole batch."""

    draft: float = 0.0
    tree: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    commit: float = 0.0
    drafter_busy: float = 0.0
    transport: float = 0.0


@dataclass(slots=True)
class Stats:
    """Figures of one request; times in seconds."""

    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0
    num_drafted_steps: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_fallback_steps: int = 0
    num_shadow_accepted: int = 0
    accepted_histogram: list[int] = field(default_factory=list[int])
    drafted_by_depth: list[int] = field(default_factory=list[int])
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    tree_s: float = 0.0
    verify_s: float = 0.0
    accept_s: float = 0.0
    commit_s: float = 0.0
    drafter_busy_s: float = 0.0
    transport_s: list[float] = field(default_factory=list[float])

    def add_step(self, tree: DraftTree, num_accepted: int, *, wanted_draft: bool) -> None:
        """Counts one step; `num_accepted` leaves the bonus token out."""
        self.num_steps += 1
        drafted = tree.num_nodes - 1
        if drafted:
            self.num_drafted_steps += 1
            self.num_drafted_tokens += drafted
            _grow(self.drafted_by_depth, tree.max_depth)
            for depth in range(tree.max_depth):
                self.drafted_by_depth[depth] += 1
        elif wanted_draft:
            self.num_fallback_steps += 1
        self.num_accepted_tokens += num_accepted
        _grow(self.accepted_histogram, num_accepted + 1)
        self.accepted_histogram[num_accepted] += 1

    def add_times(self, times: StageTimes, *, drafted: bool) -> None:
        """Adds one step's stage times."""
        self.draft_s += times.draft
        self.tree_s += times.tree
        self.verify_s += times.verify
        self.accept_s += times.accept
        self.commit_s += times.commit
        self.drafter_busy_s += times.drafter_busy
        if drafted:
            self.transport_s.append(times.transport)


def _grow(values: list[int], length: int) -> None:
    values.extend([0] * (length - len(values)))

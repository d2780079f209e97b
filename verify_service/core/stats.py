"""Figures of steps: of one sequence's, of one request's, and of all since the start."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import add
from typing import NamedTuple

from draftwood.tree import DraftTree


class StageTimes(NamedTuple):
    """Seconds in the stages of a step, for the whole batch, or of several steps in all."""

    draft: float = 0.0
    tree: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    commit: float = 0.0
    drafter_busy: float = 0.0
    transport: float = 0.0


class SequenceStep(NamedTuple):
    """What a step was for one sequence; the bonus token is not among the accepted."""

    tree: DraftTree
    num_accepted: int
    wanted_draft: bool
    shadow_tree_tokens: int = 0  # accepted by the tree beside the chain, in shadow-linear mode

    @property
    def num_drafted(self) -> int:
        return self.tree.num_nodes - 1


@dataclass(slots=True)
class StepCounts:
    """What steps came to. Written by the device loop alone; whoever else reads may see a step half counted, but no
    field ever falls, as metrics must not."""

    num_drafted_steps: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_fallback_steps: int = 0
    num_plain_steps: int = 0
    shadow_tree_tokens: int = 0
    accepted_histogram: list[int] = field(default_factory=list[int])  # entry n: steps that accepted n tokens
    drafted_by_depth: list[int] = field(default_factory=list[int])  # entry d: steps whose tree reached depth d + 1

    @property
    def num_steps(self) -> int:
        return self.num_drafted_steps + self.num_fallback_steps + self.num_plain_steps

    def add(self, step: SequenceStep) -> None:
        if step.num_drafted:
            self.num_drafted_steps += 1
            self.num_drafted_tokens += step.num_drafted
            _grow(self.drafted_by_depth, step.tree.max_depth)
            for depth in range(step.tree.max_depth):
                self.drafted_by_depth[depth] += 1
        elif step.wanted_draft:
            self.num_fallback_steps += 1
        else:
            self.num_plain_steps += 1
        self.num_accepted_tokens += step.num_accepted
        self.shadow_tree_tokens += step.shadow_tree_tokens
        _grow(self.accepted_histogram, step.num_accepted + 1)
        self.accepted_histogram[step.num_accepted] += 1


@dataclass(slots=True)
class Stats(StepCounts):
    """Figures of one request; times in seconds."""

    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    times: StageTimes = field(default_factory=StageTimes)
    transport_s: list[float] = field(default_factory=list[float])  # of each drafted step

    def add_step(self, step: SequenceStep, times: StageTimes) -> None:
        self.add(step)
        self.times = StageTimes(*map(add, self.times, times))
        if step.num_drafted:
            self.transport_s.append(times.transport)


def _grow(values: list[int], length: int) -> None:
    values.extend([0] * (length - len(values)))

"""Told of every step on the device loop: totals always, histograms and spans where somebody asked for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from draftwood.telemetry.metrics import MAX_DEPTH_LABEL
from draftwood.tree import DraftTree
from verify_service.core.sequence import SequenceState
from verify_service.core.stats import StageTimes
from verify_service.step.acceptance_alarm import AcceptanceAlarm


class SequenceStep(NamedTuple):
    """What a step was for one sequence; the bonus token is not among the accepted."""

    tree: DraftTree
    num_accepted: int
    wanted_draft: bool
    num_shadow_accepted: int = 0  # by the tree beside the chain, in shadow-linear mode


@dataclass(slots=True)
class StepTotals:
    """Since the start. Written by the device loop alone; whoever reads may see a step half counted."""

    drafted_steps: int = 0
    fallback_steps: int = 0
    plain_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    shadow_tokens: int = 0
    # Entry d: drafted steps whose tree reached depth d + 1, that accepted a node of depth d + 1; the last holds deeper
    # ones too.
    drafted_depth: list[int] = field(default_factory=lambda: [0] * MAX_DEPTH_LABEL)
    accepted_depth: list[int] = field(default_factory=lambda: [0] * MAX_DEPTH_LABEL)

    def add(self, step: SequenceStep) -> None:
        """Counts one sequence's step."""
        num_drafted = step.tree.num_nodes - 1
        if num_drafted:
            self.drafted_steps += 1
            self.drafted_tokens += num_drafted
            self.accepted_tokens += step.num_accepted
            self.shadow_tokens += step.num_shadow_accepted
            for depth in range(min(step.tree.max_depth, MAX_DEPTH_LABEL)):
                self.drafted_depth[depth] += 1
            for depth in range(min(step.num_accepted, MAX_DEPTH_LABEL)):
                self.accepted_depth[depth] += 1
        elif step.wanted_draft:
            self.fallback_steps += 1
        else:
            self.plain_steps += 1


class StepSink(Protocol):
    """Where steps are recorded besides."""

    def step(self, steps: Sequence[SequenceStep], times: StageTimes) -> None:
        """One step of the whole batch."""
        ...


class StepTracer(Protocol):
    """Makes spans of steps."""

    def begin(self, batch: Sequence[SequenceState]) -> str:
        """A step begins; the trace context that the drafter is told, empty where no sequence is traced."""
        ...

    def step(self, steps: Sequence[SequenceStep], times: StageTimes) -> None:
        """It has ended."""
        ...


class StepObserver:
    """Used on the device loop."""

    def __init__(self) -> None:
        self.totals, self.alarm = StepTotals(), AcceptanceAlarm()
        self.sink: StepSink | None = None
        self.tracer: StepTracer | None = None

    def begin(self, batch: Sequence[SequenceState]) -> str:
        """A step begins; the trace context that the drafter is told."""
        return self.tracer.begin(batch) if self.tracer is not None else ""

    def step(self, steps: Sequence[SequenceStep], times: StageTimes) -> None:
        """The step has ended."""
        for step in steps:
            self.totals.add(step)
            if step.tree.num_nodes > 1:
                self.alarm.add(step.num_accepted)
        if self.sink is not None:
            self.sink.step(steps, times)
        if self.tracer is not None:
            self.tracer.step(steps, times)

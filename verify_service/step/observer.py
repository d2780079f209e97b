"""Told of every step on the device loop: counts always, histograms and spans where somebody asked for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from verify_service.core.sequence import SequenceState
from verify_service.core.stats import SequenceStep, StageTimes, StepCounts
from verify_service.step.acceptance_alarm import AcceptanceAlarm


class StepObserver:
    """Used on the device loop. `begin` is called with a step's batch and returns the trace context that the drafter is
    told, empty where no sequence is traced. Tracing replaces it, and `recorders` hear of steps that have ended."""

    def __init__(self) -> None:
        self.totals, self.alarm = StepCounts(), AcceptanceAlarm()
        self.begin: Callable[[Sequence[SequenceState]], str] = lambda _: ""
        self.recorders: list[Callable[[Sequence[SequenceStep], StageTimes], None]] = []

    def step(self, steps: Sequence[SequenceStep], times: StageTimes) -> None:
        """The step has ended."""
        for step in steps:
            self.totals.add(step)
            if step.num_drafted:
                self.alarm.add(step.num_accepted)
        for record in self.recorders:
            record(steps, times)

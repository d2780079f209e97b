"""Acceptance collapse: drafts are paid for, and next to none of their tokens is accepted.

A drafter with the wrong weights, or with rows that do not belong to its tokens, gives no error: texts stay right, and
every step costs a draft for about one token. Only the acceptance shows it.
"""

from __future__ import annotations

import logging
from collections import deque

log = logging.getLogger(__name__)

WINDOW_STEPS = 256  # drafted steps, over all sequences
COLLAPSED_BELOW, RECOVERED_ABOVE = 1.1, 1.25  # tokens per step, the bonus token included


def is_collapsed(num_steps: int, num_accepted: int, *, was_collapsed: bool) -> bool:
    """Whether a full window of drafted steps says so. Between the two limits it stays what it was."""
    if num_steps < WINDOW_STEPS:
        return was_collapsed
    limit = RECOVERED_ABOVE if was_collapsed else COLLAPSED_BELOW
    return 1.0 + num_accepted / num_steps < limit


class AcceptanceAlarm:
    """Watches the last drafted steps; says so in the log when acceptance collapses and when it is back."""

    def __init__(self) -> None:
        self.is_on = False
        self._accepted: deque[int] = deque(maxlen=WINDOW_STEPS)
        self._total = 0

    def add(self, num_accepted: int) -> None:
        """One drafted step of one sequence; the bonus token is not counted."""
        if len(self._accepted) == WINDOW_STEPS:
            self._total -= self._accepted[0]
        self._accepted.append(num_accepted)
        self._total += num_accepted
        was = self.is_on
        self.is_on = is_collapsed(len(self._accepted), self._total, was_collapsed=was)
        if self.is_on != was:
            tokens_per_step = 1.0 + self._total / len(self._accepted)
            if self.is_on:
                log.warning(
                    "acceptance has collapsed: %.2f tokens per step over the last %d drafted steps; the drafter costs "
                    "time and gives nothing: does it belong to this target?",
                    tokens_per_step,
                    WINDOW_STEPS,
                )
            else:
                log.warning("acceptance has recovered: %.2f tokens per step", tokens_per_step)

"""How much of the device's time prompts may take from the answers that are being decoded. Pure: the time is given."""

from __future__ import annotations

SHARE = 0.4  # of the time of the steps; a prefill makes the steps beside it 1.4 times as long in the mean
MAX_PAUSE = 16  # steps


class PrefillBudget:
    """A pass over prompts is paid back by the steps that follow it, and the next one waits until it is.

    Each prompt may take as much time as each answer that is being decoded, and all of them together at least SHARE of
    the steps' time. No prompt waits for more than MAX_PAUSE steps, however long a pass took.
    """

    def __init__(self) -> None:
        self._debt_s = 0.0
        self._num_steps = 0  # since the last pass

    @property
    def is_open(self) -> bool:
        """Whether a pass over prompts may come before the next step."""
        return self._debt_s <= 0.0 or self._num_steps >= MAX_PAUSE

    def spend(self, seconds: float) -> None:
        """A pass over prompts took so long."""
        self._debt_s, self._num_steps = seconds, 0

    def repay(self, seconds: float, *, num_prompts: int, num_answers: int) -> None:
        """A step took so long, with so many prompts waiting beside so many answers."""
        self._debt_s -= seconds * max(SHARE, num_prompts / num_answers)
        self._num_steps += 1

"""How fast requests end, so that refusals can say when to come back. Pure: the time is given."""

from __future__ import annotations

from collections import deque

WINDOW = 32  # ends that the pace is taken from
MIN_WAIT_S, MAX_WAIT_S = 1.0, 600.0


class CompletionRate:
    """Counts the time in which there was work only; times are seconds of any one clock."""

    def __init__(self, now: float) -> None:
        self._idle_since: float | None = now
        self._idle_s = 0.0
        self._ends: deque[float] = deque([now], maxlen=WINDOW + 1)  # the first one begins the window

    def mark_busy(self, now: float) -> None:
        if self._idle_since is not None:
            self._idle_s += now - self._idle_since
            self._idle_since = None

    def mark_idle(self, now: float) -> None:
        if self._idle_since is None:
            self._idle_since = now

    def record(self, now: float) -> None:
        """A request ended and made room for another."""
        self._ends.append(self._busy(now))

    def wait_s(self, num_ahead: int, now: float) -> float:
        """Seconds until so many requests will have ended; before the first end, as if one ended right now."""
        each = (self._busy(now) - self._ends[0]) / max(len(self._ends) - 1, 1)
        return min(max(num_ahead * each, MIN_WAIT_S), MAX_WAIT_S)

    def _busy(self, now: float) -> float:
        idle = now - self._idle_since if self._idle_since is not None else 0.0
        return now - self._idle_s - idle

"""Stop strings: the answer is what comes before the first one to be completed, and nothing that may still become part
of one is given out before that is known."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """State of one answer.

    The result does not depend on how the text is cut into pieces: of two stop strings that occur, the one completed
    first counts, and of two completed by the same character, the longer.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is certain to be before any stop string, and whether one has been completed."""
        if not self._stops or not text:
            return text, False
        buffer = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := buffer.find(stop)) >= 0]
        if matches:
            self._held = ""
            return buffer[: min(matches)[1]], True
        kept = self._length_to_hold(buffer)
        cut = len(buffer) - kept
        self._held = buffer[cut:]
        return buffer[:cut], False

    def _length_to_hold(self, buffer: str) -> int:
        """Length of the longest end of the buffer that begins a stop string."""
        for length in range(min(len(buffer), self._longest - 1), 0, -1):
            if any(stop.startswith(buffer[-length:]) for stop in self._stops):
                return length
        return 0

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

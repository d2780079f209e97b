"""The one place where a step's stages are timed."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from verify_service.core.stats import StageTimes


class StageClock:
    """Adds up the seconds of each stage of one step; a step of several passes goes through some of them again."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """The body is the stage, or a part of it."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    def times(self, *, drafter_busy: float, transport: float) -> StageTimes:
        """All stages, with what the drafter says of its part."""
        return StageTimes(**self._seconds, drafter_busy=drafter_busy, transport=transport)

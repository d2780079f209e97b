"""A straight line through samples of memory, with the standard error of its slope. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BLOCK_S = 10.0
MIN_BLOCKS = 8  # with fewer, a slope says nothing
ERRORS = 2.0  # standard errors that the slope may be above 0


@dataclass(frozen=True, kw_only=True)
class Slope:
    """Growth per second, by least squares over the means of blocks: samples beside each other are not independent."""

    per_s: float
    error: float
    num_blocks: int

    @property
    def is_judged(self) -> bool:
        """Whether there were enough blocks."""
        return self.num_blocks >= MIN_BLOCKS

    @property
    def is_flat(self) -> bool:
        """Whether it does not grow beyond its error."""
        return self.per_s <= ERRORS * self.error


def fit(samples: Sequence[tuple[float, float]], *, since_s: float, block_s: float = BLOCK_S) -> Slope:
    """The line through (seconds, value) from `since_s` on; the last block may be a part of one."""
    blocks: dict[int, list[tuple[float, float]]] = {}
    for seconds, value in samples:
        if seconds >= since_s:
            blocks.setdefault(int((seconds - since_s) // block_s), []).append((seconds, value))
    means = np.array([np.mean(block, axis=0) for block in blocks.values()]).reshape(-1, 2)
    n = means.shape[0]
    if n < 3:
        return Slope(per_s=0.0, error=0.0, num_blocks=n)
    x, y = means[:, 0] - means[:, 0].mean(), means[:, 1] - means[:, 1].mean()
    spread = float((x * x).sum())
    per_s = float((x * y).sum()) / spread
    residual = float(((y - per_s * x) ** 2).sum())
    return Slope(per_s=per_s, error=float(np.sqrt(residual / (n - 2) / spread)), num_blocks=n)

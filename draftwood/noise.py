"""Counter-based Gumbel noise: a pure function of (seed, position, token id), the same on every side of the wire.

Philox4x32-10 (Salmon et al., SC 2011, section 3.2) with the request's seed as its key and the counter
(token id // 4, position, 0, 0); output word w belongs to token 4 * (token id // 4) + w.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

# Raise it with every change that gives another value at some (seed, position, token id): services of different versions
# would rank with one noise and draw with another, which lowers acceptance without an error.
NOISE_VERSION = 1

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROUNDS = 10


def philox(seed: int, position: int, num_words: int) -> NDArray[np.uint64]:
    """The first `num_words` 32-bit words at (seed, position), as uint64 [num_words]."""
    num_blocks = -(-num_words // 4)
    c0 = np.arange(num_blocks, dtype=np.uint64)
    c1 = np.full(num_blocks, position & 0xFFFFFFFF, dtype=np.uint64)
    c2 = np.zeros(num_blocks, dtype=np.uint64)
    c3 = np.zeros(num_blocks, dtype=np.uint64)
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(_ROUNDS):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ np.uint64(k0), p1 & _LOW, (p0 >> _32) ^ c3 ^ np.uint64(k1), p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).reshape(-1)[:num_words]


def gumbel(seed: int, position: int, vocab_size: int) -> NDArray[np.float32]:
    """Standard Gumbel noise for every token at `position`, float32 [vocab_size]; always finite.

    -log(E) with E = -log1p(-(x + 1/2) 2^-32), x the token's 32-bit word.
    """
    uniform = (philox(seed, position, vocab_size).astype(np.float64) + 0.5) * 2.0**-32
    return (-np.log(-np.log1p(-uniform))).astype(np.float32)


class NoiseCache:
    """Rows of Gumbel noise by (seed, position), the latest `capacity` kept: steps overlap in the positions they use."""

    def __init__(self, vocab_size: int, capacity: int = 512) -> None:
        self.vocab_size, self.capacity = vocab_size, capacity
        self._rows: OrderedDict[tuple[int, int], NDArray[np.float32]] = OrderedDict()

    def row(self, seed: int, position: int) -> NDArray[np.float32]:
        """float32 [vocab_size]; not to be written to."""
        key = (seed, position)
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = gumbel(seed, position, self.vocab_size)
            row.flags.writeable = False
            if len(self._rows) > self.capacity:
                self._rows.popitem(last=False)
        else:
            self._rows.move_to_end(key)
        return row

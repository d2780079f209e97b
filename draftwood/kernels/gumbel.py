"""draftwood.noise on a GPU: the same Philox words, and Gumbel noise of them in two precisions.

    noise = -log(E)      E = -log(1 - u)      u = (x + 1/2) 2^-32, x the token's word

1 - u is exact in float64, so that `exact_noise` differs from numpy's by the last bit of a float64 logarithm, which the
rounding to float32 hides but once in some 10^8 values. `fast_noise` is float32 throughout and at most NOISE_ERROR off:
good enough to find the few tokens that can win, and for rankings that only guess.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOISE_ERROR = tl.constexpr(1e-4)
_SERIES_BELOW = tl.constexpr(1 << 27)  # of the word: u < 1/32, where 1 - u has lost too many bits in float32


@triton.jit
def words(seed, position, first, BLOCKS: tl.constexpr):
    """The words [4 * BLOCKS], uint32, of tokens 4 * first onwards. `seed` holds the seed's 64 bits, int64."""
    c0 = (first + tl.arange(0, BLOCKS)).to(tl.uint32)
    zero = c0 * 0
    w0, w1, w2, w3 = tl.philox(seed, c0, zero + position.to(tl.uint32), zero, zero)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [4 * BLOCKS])


@triton.jit
def word(seed, position, token):
    """The word of one token, uint32."""
    c0 = (token // 4).to(tl.uint32)
    zero = c0 * 0
    w0, w1, w2, w3 = tl.philox(seed, c0, zero + position.to(tl.uint32), zero, zero)
    lane = token % 4
    return tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))


@triton.jit
def fast_noise(x):
    """float32 noise of uint32 words."""
    is_upper = x >= 0x80000000
    v = (tl.where(is_upper, ~x, x).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # the smaller of u and 1 - u
    series = v * (1.0 + v * (0.5 + v * (0.3333333333 + v * (0.25 + v * 0.2))))
    e = tl.where(x < _SERIES_BELOW, series, -0.6931471805599453 * tl.log2(tl.where(is_upper, v, 1.0 - v)))
    return -0.6931471805599453 * tl.log2(e)


@triton.jit
def exact_noise(x):
    """float32 noise of uint32 words, by float64."""
    rest = 1.0 - (x.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(rest))).to(tl.float32)

"""Matrix products that kernels share: exact where the operands are 16-bit, near float32 where they are not."""

from __future__ import annotations

import triton
import triton.language as tl

# The interpreter multiplies the bit patterns of bfloat16; there operands are widened first, which changes no product.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def product(x, y, accumulator):
    """accumulator + x @ y in float32; products of 16-bit operands are exact."""
    if INTERPRETED:
        return accumulator + tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(x, y, accumulator, input_precision="tf32x3")

"""Matrix products in float32 accuracy on units of 16 bits, and what they are split into."""

from __future__ import annotations

import triton
import triton.language as tl

# The interpreter multiplies the bit patterns of bfloat16, and cuts off where a GPU rounds. There operands are widened
# before a product, which changes none, and are split in float32.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def matmul(x, y, total):
    """total + x @ y in float32. Products of 16-bit operands are exact; float32 ones are made of three of tf32."""
    if INTERPRETED:
        return total + tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(x, y, total, input_precision="tf32x3")


@triton.jit
def split(x):
    """Three bfloat16 whose sum is x to its last bit."""
    first = x.to(tl.bfloat16)
    rest = x - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    return first, second, (rest - second.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def matmul_parts(x, first, second, third, total):
    """total + x @ (first + second + third) for x in float32: the six products of 16 bits that count, smallest first."""
    x1, x2, x3 = split(x)
    total = matmul(x3, first, total)
    total = matmul(x1, third, total)
    total = matmul(x2, second, total)
    total = matmul(x2, first, total)
    total = matmul(x1, second, total)
    return matmul(x1, first, total)

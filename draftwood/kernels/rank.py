"""Tokens in the order of their scores, ties to the lower id, as one integer each."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def order_of(value):
    """An int32 that is ordered as the float32 is; zeros must have one sign."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def rank_of(value, ids):
    """The rank of tokens, int64: larger scores above smaller ones, then lower ids above higher ones."""
    return (order_of(value).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def value_of(rank):
    """The score in a rank."""
    order = (rank >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)

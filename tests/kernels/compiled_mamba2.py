"""Mamba2 at Nemotron-H's shape: 128 heads of 64, state 128, 8 groups."""

from __future__ import annotations

from tests.kernels.compiled_kernels import Entry

MAMBA2 = tuple(
    Entry(
        f"mamba2_verify-{rows}x{words}",
        "verify_service.kernels.triton.mamba2_verify:_mamba2_verify_kernel",
        {"conv": "*bf16", "g": "*fp32", "dt": "*fp32", "ancestors": "*i64", "states": "*fp32", "slots": "*i32"}
        | {"skip": "*fp32", "out": "*bf16", "N": "i32", "C": "i32"},
        {"HK": 8, "HV": 128, "K": 128, "V": 64, "W": words, "BT": rows, "BV": 32, "BK": 64},
        num_warps=8 if rows == 64 else 4,
        num_stages=2,
    )
    for rows, words in ((16, 1), (32, 1), (64, 1), (64, 4))
)

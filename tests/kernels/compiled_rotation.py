"""The kernel between an attention layer's projection and its attention, at the shape of Qwen3.6-27B."""

from __future__ import annotations

from tests.kernels.compiled_kernels import Entry

ROTATION = (
    Entry(
        "rotate_heads",
        "verify_service.kernels.triton.between_products:rotate_heads_kernel",
        {"x": "*bf16", "row_stride": "i64", "cos": "*bf16", "sin": "*bf16", "q_weight": "*fp32", "k_weight": "*fp32"}
        | {"q": "*bf16", "keys": "*bf16", "values": "*bf16", "eps": "fp32"},
        {"HQ": 24, "HKV": 4, "D": 256, "DP": 256, "R": 64, "STEP": 512, "OVERLAPS": True},
        num_warps=1,
    ),
)

"""The kernels between the matrix products of a decoder layer, at the shape of Qwen3.6-27B."""

from __future__ import annotations

from tests.kernels.compiled_kernels import Entry

MODULE = "verify_service.kernels.triton.between_products"
LAYERS = (
    Entry(
        "add_norm",
        f"{MODULE}:add_norm_kernel",
        {"x": "*bf16", "delta": "*bf16", "weight": "*fp32", "total": "*bf16", "normed": "*bf16", "eps": "fp32"}
        | {"x_row": "i32", "delta_row": "i32"},
        {"H": 5120, "HP": 8192, "OVERLAPS": True},
        num_warps=16,
    ),
    Entry(
        "swiglu",
        f"{MODULE}:swiglu_kernel",
        {"x": "*bf16", "out": "*bf16", "x_row": "i32"},
        {"F": 17408, "BF": 1024, "OVERLAPS": True},
    ),
)

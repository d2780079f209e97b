"""Kernels of sampling and of the accept walk, at the vocabulary of Qwen3.6."""

from __future__ import annotations

from tests.kernels.compiled_kernels import Entry

_ROW_SETTINGS = {"temperature": "*fp32", "top_k": "*i32", "top_p": "*fp64", "min_p": "*fp64"}
_ROWS = {"logits": "*bf16", "num_nodes": "*i32", "row_stride": "i64", "N": "i32", "V": "i32"}
_SPLIT = {"BLOCK": 4096, "LEAST": 1e-5}  # a vocabulary of 248320

SAMPLING = (
    *(
        Entry(
            f"sample{'-filtered' if has_filters else ''}",
            "verify_service.kernels.triton.acceptance:_sample_kernel",
            _ROWS
            | {"positions": "*i64", "temperature": "*fp32", "seed": "*i64", "limits": "*i64", "values": "*fp32"}
            | {"chosen": "*i32", "arrived": "*i32", "tokens": "*i32"},
            _SPLIT | {"BLOCK": 2048, "MAX_SPLITS": 128, "HAS_FILTERS": has_filters},
        )
        for has_filters in (False, True)
    ),
    Entry(
        "filters-survey",
        "verify_service.kernels.triton.filters:_survey_kernel",
        _ROWS
        | _ROW_SETTINGS
        | {
            "limits": "*i64",
            "peaks": "*fp32",
            "partial": "*fp32",
            "floor": "*i32",
            "mass": "*fp64",
            "arrived": "*i32",
        },
        _SPLIT | {"MAX_SPLITS": 256, "GROUP": 64, "MAX_PEAKS": 4096, "NUCLEUS": 1024},
        num_warps=8,
    ),
    Entry(
        "filters-threshold",
        "verify_service.kernels.triton.filters:_threshold_kernel",
        _ROWS
        | _ROW_SETTINGS
        | {"limits": "*i64", "floor": "*i32", "mass": "*fp64", "ranks": "*i64", "gathered": "*i32", "arrived": "*i32"},
        _SPLIT | {"CAPACITY": 4096},
        num_warps=8,
    ),
    Entry(
        "accept_walk",
        "verify_service.kernels.triton.acceptance:_accept_walk_kernel",
        {"input_ids": "*i64", "N": "i32", "M": "i32"}
        | dict.fromkeys(("parents", "num_nodes", "drawn", "stop_ids", "remaining"), "*i32")
        | dict.fromkeys(("path", "path_length", "tokens", "finish"), "*i32"),
        {"D_PATH": 16, "BN": 64, "BM": 8, "BD": 16},
        num_warps=1,
    ),
)

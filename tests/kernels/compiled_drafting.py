"""Kernels of the draft service, at the vocabulary and block of Qwen3.6-27B's drafter."""

from __future__ import annotations

from tests.kernels.compiled_kernels import Entry

_INPUTS = {
    "logits": "*bf16",
    "temperature": "*fp32",
    "seed": "*i64",
    "base_lengths": "*i32",
    "peaks": "*i64",
    "sums": "*fp32",
    "row_stride": "i64",
    "DEPTHS": "i32",
    "V": "i32",
}
_TILES = {"BLOCK": 4096, "LANES": 64, "MAX_TILES": 64}
_TREE = (
    dict.fromkeys(("token_ids", "parents", "depths", "num_nodes", "roots", "candidate_ids"), "*i32")
    | dict.fromkeys(("budgets", "widths", "spines"), "*i32")
    | dict.fromkeys(("scores", "log_probs"), "*fp32")
)

DRAFTING = (
    Entry("likeliest-survey", "draft_service.kernels.triton.likeliest:_survey_kernel", _INPUTS, _TILES, num_warps=8),
    Entry(
        "likeliest-select",
        "draft_service.kernels.triton.likeliest:_select_kernel",
        _INPUTS
        | {"lanes": "*i32", "ranks": "*i64", "token_ids": "*i32", "scores": "*fp32", "log_probs": "*fp32"}
        | {"WIDTH": "i32", "tiles": "i32"},
        _TILES | {"MAX_WIDTH": 64, "CHUNK": 128},
        num_warps=8,
    ),
    *(
        Entry(
            f"best_first-{nodes}",
            "draft_service.kernels.triton.best_first:_best_first_kernel",
            _TREE | {"values": "*fp32", "DEPTHS": "i32", "WIDTH": "i32", "N": "i32"},
            {"ENTRIES": 2 * nodes, "BN": nodes},
            num_warps=1,
        )
        for nodes in (64, 256)
    ),
)

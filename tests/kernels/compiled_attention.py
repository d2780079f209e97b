"""Kernels of attention, of the KV commit and of the trees' metadata, at the heads of Qwen3.6-27B."""

from __future__ import annotations

from tests.kernels.compiled_kernels import Entry


def _attention(
    dtype: str, d: int, tile: tuple[int, int], stack_limit: dict[int, int], num_warps: int, num_stages: int
) -> Entry:
    """24 query over 4 KV heads, 64 nodes (1 for tiles of 16 rows), slices that the merge puts together."""
    rows, keys = tile
    n, hq, hkv = 64 if rows > 16 else 1, 24, 4
    pointers = dict.fromkeys(("q", "k", "v", "key_pool", "value_pool", "out"), f"*{dtype}")
    descriptors = dict.fromkeys(("key_descriptor", "value_descriptor"), f"tensordesc<{dtype}[{keys}, {d}]>")
    descriptors |= dict.fromkeys(("k_descriptor", "v_descriptor"), f"tensordesc<{dtype}[1, {keys}, {d}]>")
    indices = {"page_table": "*i32", "base_lengths": "*i32", "ancestors": "*i64", "positions": "*i64"}
    floats = dict.fromkeys(("factor", "unit", "cap"), "fp32") | dict.fromkeys(("partial", "sums"), "*fp32")
    strides = {f"{name}_b": n * heads * d for name, heads in (("q", hq), ("k", hkv), ("v", hkv), ("out", hq))}
    strides |= {f"{name}_n": heads * d for name, heads in (("q", hq), ("k", hkv), ("v", hkv), ("out", hq))}
    strides |= {f"{name}_h": d for name in ("q", "k", "v", "out")}
    return Entry(
        name=f"tree_attention-{dtype}-{d}-{rows}x{keys}",
        kernel="verify_service.kernels.triton.tree_attention:_attend",
        types=pointers | descriptors | indices | floats | {"sinks": "*fp32", "P": "i32"},
        constants=strides
        | {"slots": 1 << 16, "N": n, "W": 1, "HQ": hq, "HKV": hkv, "D": d, "DP": 1 << (d - 1).bit_length(), "PAGE": 64}
        | {
            "DESCRIPTORS": True,
            "NODE_DESCRIPTORS": True,
            "PREFETCH": True,
            "OVERLAP": True,
            "EDGE": keys,
            "WINDOW": 0,
            "SOFT_CAP": False,
            "SINKS": False,
            "ROWS": rows,
            "KEYS": keys,
        }
        | {"SLICES": 11, "LEAST": 128},
        num_warps=num_warps,
        num_stages=num_stages,
        stack_limit=stack_limit,
        architectures=tuple(stack_limit),
    )


_MERGE = Entry(
    name="tree_attention-merge",
    kernel="verify_service.kernels.triton.tree_attention:_merge",
    types={"partial": "*fp32", "sums": "*fp32", "base_lengths": "*i32", "out": "*bf16"},
    constants={"out_b": 64 * 24 * 256, "out_n": 24 * 256, "out_h": 256, "N": 64, "HQ": 24, "D": 256}
    | {"WINDOW": 0, "KEYS": 64, "SLICES": 11, "SP": 16, "LEAST": 128, "OVERLAP": True, "ROWS": 2, "CHUNK": 256},
)
_KV_COMMIT = Entry(
    name="kv_commit",
    kernel="verify_service.kernels.triton.commit:_copy",
    types=dict.fromkeys(("keys", "values", "key_pool", "value_pool"), "*bf16")
    | dict.fromkeys(("path", "path_length", "base_lengths", "page_table"), "*i32")
    | {"S": "i32", "P": "i32"},
    constants={"B": 8, "N": 64, "HKV": 4, "D": 256, "LONGEST": 16, "PAGE": 64, "BLOCK": 1024},
)
_TREE_METADATA = Entry(
    name="tree_metadata",
    kernel="verify_service.kernels.triton.tree_metadata:_walk",
    types=dict[str, str]()
    | dict.fromkeys(("parents", "num_nodes", "base_lengths", "depths", "tree_depth", "block_depth"), "*i32")
    | dict.fromkeys(("positions", "ancestors"), "*i64"),
    constants={"N": 256, "NP": 256, "W": 4, "WP": 4},
)
ATTENTION = (
    _attention("bf16", 256, (128, 64), {90: 96}, num_warps=8, num_stages=2),
    _attention("bf16", 256, (16, 64), {90: 0}, num_warps=4, num_stages=3),
    _attention("bf16", 256, (64, 32), {120: 0}, num_warps=8, num_stages=2),
    _attention("bf16", 256, (16, 32), {120: 0}, num_warps=4, num_stages=2),
    _attention("fp32", 256, (16, 16), {120: 32}, num_warps=4, num_stages=2),
    _MERGE,
    _KV_COMMIT,
    _TREE_METADATA,
)

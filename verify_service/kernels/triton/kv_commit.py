"""Commit of KV rows: the accepted nodes' rows go into the pools, all attention layers in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from draftwood.errors import UnsupportedModelError
from verify_service.cache.commit_inputs import CommitInputs
from verify_service.cache.pools import Pools
from verify_service.kernels.arguments import Outcome, TreeMetadata
from verify_service.kernels.triton.launch import require


@triton.jit(do_not_specialize=["P"])
def _copy(
    keys, values, path, path_length, base_lengths, page_table, key_pool, value_pool, S, P,
    B: tl.constexpr, N: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, LONGEST: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (step of the path, row of the batch, layer)."""
    step, b, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if step >= tl.load(path_length + b):
        return
    node = tl.load(path + b * LONGEST + step)
    position = tl.load(base_lengths + b) + step
    slot = tl.load(page_table + b * P + position // PAGE).to(tl.int64) * PAGE + position % PAGE
    at = tl.arange(0, BLOCK)
    inside = at < HKV * D
    source = ((layer * B + b) * N + node) * (HKV * D) + at
    target = ((layer * HKV + at // D) * S + slot) * D + at % D
    K = tl.load(keys + source, mask=inside)
    V = tl.load(values + source, mask=inside)
    tl.store(key_pool + target, K, mask=inside)
    tl.store(value_pool + target, V, mask=inside)


def kv_commit(commit_inputs: CommitInputs, outcome: Outcome, pools: Pools, tree: TreeMetadata, page_size: int) -> None:
    """Copies the rows of path[0], path[1], … to positions base, base + 1, …; they were rotated for just these."""
    tensors = (commit_inputs.keys, commit_inputs.values, pools.keys, pools.values)
    is_contiguous = all(t.is_contiguous() for t in tensors)
    require(is_contiguous, "strides", "commit inputs and pools of keys and values must be contiguous")
    if len({t.dtype for t in tensors}) > 1:
        raise UnsupportedModelError(f"dtypes {[str(t.dtype) for t in tensors]} must be one", field="dtype")
    layers, b, n, hkv, d = commit_inputs.keys.shape
    longest = outcome.path.shape[1]
    if layers == 0:
        return
    _copy[(longest, b, layers)](
        commit_inputs.keys, commit_inputs.values, outcome.path, outcome.path_length, tree.base_lengths,
        tree.page_table, pools.keys, pools.values, pools.keys.shape[2], tree.page_table.shape[1],
        B=b, N=n, HKV=hkv, D=d, LONGEST=longest, PAGE=page_size, BLOCK=triton.next_power_of_2(hkv * d), num_warps=4,
    )  # fmt: skip

"""Commits along accepted paths, all layers at once: states and windows of recurrent layers, rows of keys and values.

The one-token recurrence of its twin in float32, token after token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftwood.errors import UnsupportedModelError
from verify_service.cache.commit_inputs import CommitInputs
from verify_service.cache.pools import Pools
from verify_service.core.target_spec import GDN, MAMBA2, RecurrentShape
from verify_service.kernels.arguments import Outcome, TreeMetadata
from verify_service.kernels.triton.launch import require, require_head_sizes, require_kernel_size

WINDOW_BLOCK = 1024  # channels
STATE, STATE_WARPS = 8192, 4  # numbers of a state that a program has
KEY_CHUNK = 32  # so that 8 lanes share a row, and sum it in three exchanges


@triton.jit
def _token(
    conv, norms, g, beta, node, first_key, rows, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KC: tl.constexpr, IS_DELTA: tl.constexpr,
):  # fmt: skip
    """A node's k, in chunks of KC and not normed yet, its norm, v [rows], g and beta."""
    C: tl.constexpr = 2 * HK * K + HV * V
    conv += node * C
    k = ()
    for start in tl.static_range(0, K, KC):
        k = k + (tl.load(conv + first_key + start + tl.arange(0, KC)),)  # noqa: RUF005 — Triton has no unpacking
    norm = tl.load(norms + node * 2 * HK) if IS_DELTA else 1.0
    return k, norm, tl.load(conv + rows), tl.load(g + node * HV), tl.load(beta + node * HV)


@triton.jit
def _step(s, token, K: tl.constexpr, KC: tl.constexpr, IS_DELTA: tl.constexpr):
    """The state after a token; chunks of columns in a tuple."""
    raw, norm, v, step, strength = token
    decay = tl.exp(step)
    decayed, keys = (), ()
    read = tl.zeros_like(s[0])
    for i in tl.static_range(K // KC):
        key = raw[i].to(tl.float32) * norm
        chunk = s[i] * decay
        if IS_DELTA:
            read += chunk * key[None, :]
        decayed, keys = decayed + (chunk,), keys + (key,)  # noqa: RUF005
    u = (v.to(tl.float32) - tl.sum(read, 1)) * strength if IS_DELTA else v.to(tl.float32) * strength
    after = ()
    for i in tl.static_range(K // KC):
        after = after + (decayed[i] + u[:, None] * keys[i][None, :],)  # noqa: RUF005
    return after


@triton.jit
def _commit_state(
    conv, norms, g, beta, path, n, node, next_node, states, layer, b, block, slot, B, N, T, HK: tl.constexpr,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, KC: tl.constexpr, IS_DELTA: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 2 * HK * K + HV * V
    hv = block // (V // BV)
    hk = hv // (HV // HK)
    rows = block % (V // BV) * BV + tl.arange(0, BV)
    first = (layer * B + b) * N
    states += layer * T * HV * V * K + (hv * V + rows[:, None]) * K + tl.arange(0, KC)[None, :]
    s = ()
    for start in tl.static_range(0, K, KC):
        s = s + (tl.load(states + slot * HV * V * K + start),)  # noqa: RUF005
    conv += first * C
    norms += first * 2 * HK + HK + hk
    g += first * HV + hv
    beta += first * HV + hv
    key = (HK * K if IS_DELTA else HV * V) + hk * K
    rows += (2 * HK * K if IS_DELTA else 0) + hv * V
    # One token ahead, and its node one more, so that a step waits for no load.
    token = _token(conv, norms, g, beta, node, key, rows, HK, HV, K, V, KC, IS_DELTA)
    node = next_node
    for t in range(n):
        following = _token(conv, norms, g, beta, node, key, rows, HK, HV, K, V, KC, IS_DELTA)
        node = tl.load(path + tl.minimum(t + 2, n - 1))
        s = _step(s, token, K, KC, IS_DELTA)
        token = following
    for i in tl.static_range(K // KC):
        tl.store(states + slot * HV * V * K + i * KC, s[i])


@triton.jit
def _commit_window(
    inputs, path, n, windows, layer, b, block, slot, B, N, T, C: tl.constexpr, KERNEL_SIZE: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    channels = block * BC + tl.arange(0, BC)
    mask = channels < C
    windows += layer * T * (KERNEL_SIZE - 1) * C + channels
    inputs += (layer * B + b) * N * C + channels
    own = windows + slot * (KERNEL_SIZE - 1) * C
    # The newest three of (window ++ path), whatever of them a window of fewer kernel_size has.
    newest = tl.load(own + (KERNEL_SIZE - 2) * C, mask=mask)
    second = tl.load(own + max(KERNEL_SIZE - 3, 0) * C, mask=mask)
    third = tl.load(own + max(KERNEL_SIZE - 4, 0) * C, mask=mask)
    for t in range(tl.maximum(n - 3, 0), n):
        third, second = second, newest
        newest = tl.load(inputs + tl.load(path + t) * C, mask=mask)
    tl.store(own + (KERNEL_SIZE - 2) * C, newest, mask=mask)
    if KERNEL_SIZE > 2:
        tl.store(own + (KERNEL_SIZE - 3) * C, second, mask=mask)
    if KERNEL_SIZE > 3:
        tl.store(own, third, mask=mask)


@triton.jit
def recurrent_commit_kernel(
    conv, norms, g, beta, inputs, path, length, states, windows, slots, B, N, T, D: tl.constexpr,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KERNEL_SIZE: tl.constexpr,
    BV: tl.constexpr, KC: tl.constexpr, BC: tl.constexpr, IS_DELTA: tl.constexpr,
):  # fmt: skip
    """grid (HV V / BV + ceil(C / BC), B, R): BV rows of a head's state, or BC channels of a window."""
    block, b, layer = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    STATE_BLOCKS: tl.constexpr = HV * V // BV
    path += b * D
    n, slot = tl.load(length + b), tl.load(slots + b).to(tl.int64)
    node, next_node = tl.load(path), tl.load(path + min(1, D - 1))
    if n > 0:
        if STATE_BLOCKS == 0:  # windows alone: nothing of a state's has its type
            _commit_window(inputs, path, n, windows, layer, b, block, slot, B, N, T, C, KERNEL_SIZE, BC)
        elif block < STATE_BLOCKS:
            _commit_state(
                conv, norms, g, beta, path, n, node, tl.where(n > 1, next_node, node), states, layer, b,
                block, slot, B, N, T, HK, HV, K, V, BV, KC, IS_DELTA,
            )  # fmt: skip
        else:
            _commit_window(inputs, path, n, windows, layer, b, block - STATE_BLOCKS, slot, B, N, T, C, KERNEL_SIZE, BC)


def recurrent_commit(
    shape: RecurrentShape, commit_inputs: CommitInputs, outcome: Outcome, pools: Pools, tree: TreeMetadata
) -> None:
    layers, b, n, channels = commit_inputs.inputs.shape
    slots, kernel_size = pools.windows.shape[1], pools.windows.shape[2] + 1
    require_kernel_size(kernel_size)
    heads, value_dim, key_dim, key_heads = 0, 16, 16, 1
    unused = outcome.path
    conv, norms, g, beta = (unused,) * 4
    if shape.kind in (GDN, MAMBA2):
        heads, value_dim, key_dim = pools.states.shape[2:]
        require_head_sizes(linear_key_head_dim=key_dim, linear_value_head_dim=value_dim)
        conv, g, beta = commit_inputs.conv, commit_inputs.g, commit_inputs.beta
        key_heads = (conv.shape[-1] - heads * value_dim) // (2 * key_dim)
        norms = commit_inputs.norms if shape.kind == GDN else unused
    rows = min(value_dim, max(16, STATE // key_dim))
    grid = (heads * value_dim // rows + triton.cdiv(channels, WINDOW_BLOCK), b, layers)
    recurrent_commit_kernel[grid](
        conv, norms, g, beta, commit_inputs.inputs, outcome.path, outcome.path_length, pools.states, pools.windows,
        tree.state_slots, b, n, slots, outcome.path.shape[1], key_heads, heads, key_dim, value_dim, channels,
        kernel_size, rows, min(key_dim, KEY_CHUNK), WINDOW_BLOCK, shape.kind == GDN,
        num_warps=max(1, min(STATE_WARPS, rows * key_dim // 512)),
    )  # fmt: skip


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

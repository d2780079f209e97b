"""Commit of recurrent layers: states and convolution windows move on along the accepted path, all layers at once.

    Gated DeltaNet   S <- e^g S,  u = b (v - S k),  S <- S + u k^T        Mamba2   S <- e^g S + (dt x) B^T

The one-token recurrence in float32, token after token: a path of n tokens leaves what n paths of one leave, bit for
bit.
Where a snapshot slot is given for a position of the path, the state after it is stored there too.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from verify_service.kernels.reference.gdn_commit import gdn_commit_one
from verify_service.kernels.reference.mamba2_commit import mamba2_commit_one
from verify_service.kernels.reference.tree_conv import commit_window
from verify_service.kernels.triton.launch import require

WINDOW_BLOCK = 1024  # channels
STATE, STATE_WARPS = 8192, 4  # numbers of a state that a program has
KEY_CHUNK = 32  # so that 8 lanes share a row, and sum it in three exchanges


@dataclass(frozen=True, slots=True)
class RecurrentInputs:
    """What a pass left for the commit, of all R layers."""

    conv: Tensor  # [R, B, N, 2 HK K + HV V]: q | k | v of Gated DeltaNet, x | B | C of Mamba2
    norms: Tensor | None  # [R, B, N, 2 HK] float32: 1 / |q|, 1 / |k| of Gated DeltaNet; without, it is Mamba2
    g: Tensor  # [R, B, N, HV] float32, log decay
    beta: Tensor  # [R, B, N, HV] float32; dt of Mamba2


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
def _store_state(at, s, K: tl.constexpr, KC: tl.constexpr):
    for i in tl.static_range(K // KC):
        tl.store(at + i * KC, s[i])


@triton.jit
def _commit_state(
    conv, norms, g, beta, path, n, node, next_node, states, snapshots, layer, b, block, slot, B, N, T, HK: tl.constexpr,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, KC: tl.constexpr, IS_DELTA: tl.constexpr,
    HAS_SNAPSHOTS: tl.constexpr,
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
        if HAS_SNAPSHOTS:
            kept = tl.load(snapshots + t).to(tl.int64)
            if kept > 0:
                _store_state(states + kept * HV * V * K, s, K, KC)
        token = following
    _store_state(states + slot * HV * V * K, s, K, KC)


@triton.jit
def _commit_window(
    inputs, path, n, windows, snapshots, layer, b, block, slot, B, N, T, C: tl.constexpr, KERNEL_SIZE: tl.constexpr,
    BC: tl.constexpr, HAS_SNAPSHOTS: tl.constexpr,
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
    for t in range(0 if HAS_SNAPSHOTS else tl.maximum(n - 3, 0), n):
        third, second = second, newest
        newest = tl.load(inputs + tl.load(path + t) * C, mask=mask)
        if HAS_SNAPSHOTS:
            kept = tl.load(snapshots + t).to(tl.int64)
            if kept > 0:
                _store_window(windows + kept * (KERNEL_SIZE - 1) * C, newest, second, third, mask, C, KERNEL_SIZE)
    _store_window(own, newest, second, third, mask, C, KERNEL_SIZE)


@triton.jit
def _store_window(window, newest, second, third, mask, C: tl.constexpr, KERNEL_SIZE: tl.constexpr):
    tl.store(window + (KERNEL_SIZE - 2) * C, newest, mask=mask)
    if KERNEL_SIZE > 2:
        tl.store(window + (KERNEL_SIZE - 3) * C, second, mask=mask)
    if KERNEL_SIZE > 3:
        tl.store(window, third, mask=mask)


@triton.jit
def recurrent_commit_kernel(
    conv, norms, g, beta, inputs, path, length, states, windows, slots, snapshots, B, N, T, D: tl.constexpr,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KERNEL_SIZE: tl.constexpr,
    BV: tl.constexpr, KC: tl.constexpr, BC: tl.constexpr, IS_DELTA: tl.constexpr, HAS_SNAPSHOTS: tl.constexpr,
):  # fmt: skip
    """grid (HV V / BV + ceil(C / BC), B, R): BV rows of a head's state, or BC channels of a window."""
    block, b, layer = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    STATE_BLOCKS: tl.constexpr = HV * V // BV
    path += b * D
    snapshots += b * D
    n, slot = tl.load(length + b), tl.load(slots + b).to(tl.int64)
    node, next_node = tl.load(path), tl.load(path + min(1, D - 1))
    if n > 0:
        if STATE_BLOCKS == 0:  # windows alone: nothing of a state's has its type
            _commit_window(
                inputs, path, n, windows, snapshots, layer, b, block, slot, B, N, T, C, KERNEL_SIZE, BC, HAS_SNAPSHOTS
            )
        elif block < STATE_BLOCKS:
            _commit_state(
                conv, norms, g, beta, path, n, node, tl.where(n > 1, next_node, node), states, snapshots, layer, b,
                block, slot, B, N, T, HK, HV, K, V, BV, KC, IS_DELTA, HAS_SNAPSHOTS,
            )  # fmt: skip
        else:
            _commit_window(
                inputs, path, n, windows, snapshots, layer, b, block - STATE_BLOCKS, slot, B, N, T, C, KERNEL_SIZE, BC,
                HAS_SNAPSHOTS,
            )  # fmt: skip


def recurrent_commit(
    recurrent: RecurrentInputs | None,  # None of short convolutions, which have windows alone
    inputs: Tensor,  # [R, B, N, C] inputs of the convolutions
    path: Tensor,  # [B, D] int32, accepted nodes from the root on
    path_length: Tensor,  # [B] int32; a row of 0 commits nothing
    states: Tensor,  # [R, T, HV, V, K] float32, changed in place
    windows: Tensor,  # [R, T, kernel_size - 1, C], newest last, changed in place
    state_slots: Tensor,  # [B] int32
    snapshot_slots: Tensor | None = None,  # [B, D] int32: slots that take the state after a position; 0 for none
) -> None:
    """Raises UnsupportedModelError where K or V is no power of two of 16 to 256, or kernel_size are not 2 to 4."""
    layers, b, n, channels = inputs.shape
    slots, kernel_size = windows.shape[1], windows.shape[2] + 1
    require(2 <= kernel_size <= 4, "conv_kernel", f"must be 2 to 4, not {kernel_size},")
    heads, value_dim, key_dim, key_heads = 0, 16, 16, 1
    unused = path
    conv, norms, g, beta = (unused,) * 4
    if recurrent is not None:
        heads, value_dim, key_dim = states.shape[2:]
        for field, size in (("linear_key_head_dim", key_dim), ("linear_value_head_dim", value_dim)):
            require(size in (16, 32, 64, 128, 256), field, f"must be 16, 32, 64, 128 or 256, not {size},")
        key_heads = (recurrent.conv.shape[-1] - heads * value_dim) // (2 * key_dim)
        conv, g, beta = recurrent.conv, recurrent.g, recurrent.beta
        norms = unused if recurrent.norms is None else recurrent.norms
    rows = min(value_dim, max(16, STATE // key_dim))
    grid = (heads * value_dim // rows + triton.cdiv(channels, WINDOW_BLOCK), b, layers)
    recurrent_commit_kernel[grid](
        conv, norms, g, beta, inputs, path, path_length, states, windows, state_slots,
        unused if snapshot_slots is None else snapshot_slots, b, n, slots, path.shape[1], key_heads, heads, key_dim,
        value_dim, channels, kernel_size, rows, min(key_dim, KEY_CHUNK), WINDOW_BLOCK,
        recurrent is not None and recurrent.norms is not None,
        snapshot_slots is not None, num_warps=max(1, min(STATE_WARPS, rows * key_dim // 512)),
    )  # fmt: skip


def recurrent_commit_plain(
    recurrent: RecurrentInputs | None,
    inputs: Tensor,
    path: Tensor,
    path_length: Tensor,
    states: Tensor,
    windows: Tensor,
    state_slots: Tensor,
    snapshot_slots: Tensor | None = None,
) -> None:
    """What `recurrent_commit` computes, shapes and all."""
    for b, length in enumerate(path_length.tolist()):
        slot = int(state_slots[b])
        for t, node in enumerate(path[b, :length].tolist()):
            if recurrent is not None:
                _commit_one(recurrent, b, node, states[:, slot])
            commit_window(windows[:, slot], inputs[:, b, node : node + 1])
            kept = 0 if snapshot_slots is None else int(snapshot_slots[b, t])
            if kept > 0:
                states[:, kept] = states[:, slot]
                windows[:, kept] = windows[:, slot]


def _commit_one(recurrent: RecurrentInputs, b: int, node: int, state: Tensor) -> None:
    layers, heads, value_dim, key_dim = state.shape
    conv, g, beta = recurrent.conv[:, b, node].float(), recurrent.g[:, b, node], recurrent.beta[:, b, node]
    keys = (conv.shape[-1] - heads * value_dim) // 2
    if recurrent.norms is None:
        x, k, _ = conv.split([heads * value_dim, keys, keys], -1)
        mamba2_commit_one(state, k.view(layers, -1, key_dim), x.view(layers, heads, value_dim), g, beta)
    else:
        norm = recurrent.norms[:, b, node].unflatten(-1, (2, -1))[:, 1, :, None]
        _, k, v = conv.split([keys, keys, heads * value_dim], -1)
        gdn_commit_one(state, k.view(layers, -1, key_dim) * norm, v.view(layers, heads, value_dim), g, beta)

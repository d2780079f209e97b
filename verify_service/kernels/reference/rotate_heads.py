"""Heads of queries and keys, normalised and rotated, out of one projection; values beside them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood.device.layers import rotate


def rotate_heads(
    x: Tensor,  # [M, q | k | v]; rows may be strided, heads of q `step` apart
    cos: Tensor,  # [M, R]
    sin: Tensor,  # [M, R]
    q_weight: Tensor,  # [D] float32, the whole factor
    k_weight: Tensor,  # [D] float32
    eps: float,
    step: int,
    q: Tensor,  # [M, HQ, D] written
    keys: Tensor,  # [M, HKV, D] written
    values: Tensor,  # [M, HKV, D] written
) -> None:
    """The norm is rounded to the format of `x`, and the rotation in float32 rounded once."""
    m, hq, d = q.shape
    hkv, r = keys.shape[1], cos.shape[1]
    queries, k, v = x[:, : hq * step + 2 * hkv * d].split([hq * step, hkv * d, hkv * d], -1)
    for part, weight, out in ((queries.view(m, hq, step)[..., :d], q_weight, q), (k.view(m, hkv, d), k_weight, keys)):
        normed = F.rms_norm(part.float(), (d,), weight, eps).to(x.dtype)
        turned = rotate(normed[..., :r].float(), cos[:, None].float(), sin[:, None].float())
        out.copy_(torch.cat([turned.to(x.dtype), normed[..., r:]], -1))
    values.copy_(v.view(m, hkv, d))

"""What is between a decoder layer's matrix products, in plain PyTorch: residual sums with their norms, SwiGLU, and
heads of queries and keys, normed and rotated."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood.device.layers import rotate
from verify_service.kernels.arguments import HeadNorms


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, total: Tensor, normed: Tensor) -> None:
    total.copy_(x + delta)
    normed.copy_(F.rms_norm(total.float(), (total.shape[-1],), weight, eps))


def swiglu(x: Tensor, out: Tensor) -> None:
    gate, up = x.chunk(2, -1)
    out.copy_(F.silu(gate) * up)


def rotate_heads(
    x: Tensor, rotation: tuple[Tensor, Tensor], norms: HeadNorms, step: int, q: Tensor, keys: Tensor, values: Tensor
) -> None:
    """The rotation is computed in float32 and rounded once."""
    m, hq, d = q.shape
    hkv = keys.shape[1]
    cos, sin = (t[:, None].float() for t in rotation)
    r = cos.shape[-1]
    queries, k, v = x[:, : hq * step + 2 * hkv * d].split([hq * step, hkv * d, hkv * d], -1)
    parts = ((queries.view(m, hq, step)[..., :d], norms.q_weight, q), (k.view(m, hkv, d), norms.k_weight, keys))
    for part, weight, out in parts:
        normed = F.rms_norm(part.float(), (d,), weight, norms.eps).to(x.dtype)
        turned = rotate(normed[..., :r].float(), cos, sin)
        out.copy_(torch.cat([turned.to(x.dtype), normed[..., r:]], -1))
    values.copy_(v.view(m, hkv, d))

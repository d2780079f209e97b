"""What is between the matrix products of a decoder layer, in plain PyTorch: residual sums with their norms, and
SwiGLU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def add_norm(
    x: Tensor,  # [M, H]
    delta: Tensor,  # [M, H]
    weight: Tensor,  # [H] float32, the whole factor
    eps: float,
    total: Tensor,  # [M, H] written: x + delta
    normed: Tensor,  # [M, H] written: its rmsnorm times the weight
) -> None:
    """The sum is rounded to the format of `x`, and normed in float32."""
    total.copy_(x + delta)
    normed.copy_(F.rms_norm(total.float(), (total.shape[-1],), weight, eps))


def swiglu(
    x: Tensor,  # [M, 2 F] gate | up
    out: Tensor,  # [M, F] written: silu(gate) up
) -> None:
    """Both steps are rounded to the format of `x`."""
    gate, up = x.chunk(2, -1)
    out.copy_(F.silu(gate) * up)

"""What is between a decoder layer's matrix products, in plain PyTorch: residual sums with their norms, and SwiGLU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, total: Tensor, normed: Tensor) -> None:
    total.copy_(x + delta)
    normed.copy_(F.rms_norm(total.float(), (total.shape[-1],), weight, eps))


def swiglu(x: Tensor, out: Tensor) -> None:
    gate, up = x.chunk(2, -1)
    out.copy_(F.silu(gate) * up)

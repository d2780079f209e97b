"""Layers that both models are made of on a CPU: packed linear layers, fused norms, gated feed-forwards, rotation.

oneDNN multiplies a weight in its own blocked order up to twice as fast as a plain one for few rows, so inference
weights are packed once. Packing needs oneDNN and a CPU; anywhere else the layers fall back to plain products.
"""

from __future__ import annotations

import contextlib
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_packed_product = torch.ops.mkldnn._linear_pointwise.default


def allow_packed_products() -> None:
    """Lets compiled graphs call oneDNN's packed products, also fused with an activation or a residual: inductor lowers
    these ops itself only where its own freezing pass has made them, and asserts otherwise. An op of ours around the
    product would do too, at 25-100 us a call."""
    from torch._inductor import lowering

    with contextlib.suppress(RuntimeError):  # registered already
        torch.library.register_fake("mkldnn::_linear_pointwise.binary", _fake_binary)
    for op in (_packed_product, torch.ops.mkldnn._linear_pointwise.binary):
        lowering.lowerings[op] = lowering.fallback_handler(op)


def _fake_binary(x: Tensor, other: Tensor, *_: object) -> Tensor:
    del x
    return torch.empty_like(other)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN packs this weight: on a CPU, in float32 or bfloat16."""
    return (
        weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and (
            weight.dtype == torch.float32
            or (weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
        )
    )


class PackedLinear(nn.Module):
    """One or several linear layers with a common input, as a single product.

    `weights` are [out_i, in]; the output is [..., sum of out_i]. Biases are all given or all absent.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, *weights: Tensor, biases: tuple[Tensor, ...] = ()) -> None:
        super().__init__()
        weight = torch.cat([w.detach() for w in weights]).contiguous()
        bias = torch.cat([b.detach() for b in biases]).to(weight.dtype) if biases else None
        self.is_packed = can_pack(weight)
        if self.is_packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_packed:
            return F.linear(x, self.weight, self.bias)
        return _packed_product(x, self.weight, self.bias, "none", [], "")


def packed(*layers: nn.Linear) -> PackedLinear:
    """Packs torch layers with a common input into one."""
    biases = tuple(b for layer in layers if (b := cast("Tensor | None", layer.bias)) is not None)
    return PackedLinear(*(layer.weight for layer in layers), biases=biases if len(biases) == len(layers) else ())


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in float32.

    `weight` is the whole factor: 1 + w where a model stores w.
    """

    weight: Tensor

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().float().clone(), persistent=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps).to(x.dtype)


class GatedMLP(nn.Module):
    """SwiGLU feed-forward: down(silu(gate x) * up x), gate and up as one product."""

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate_up = PackedLinear(gate, up)
        self.down = PackedLinear(down)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in the half-split form; cos and sin broadcast against x [..., head_dim]."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin

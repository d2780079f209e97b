"""Layers that both models are made of on a CPU: packed linear layers, fused norms, gated feed-forwards, rotation.

oneDNN multiplies a weight in its own blocked order up to twice as fast as a plain one for few rows, so inference
weights are packed once. Packing needs oneDNN and a CPU; anywhere else the layers fall back to plain products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_packed_product = torch.ops.mkldnn._linear_pointwise.default
_packed_product_with_residual = torch.ops.mkldnn._linear_pointwise.binary


def allow_packed_products() -> None:
    """Lets compiled graphs call oneDNN's packed products: inductor takes these ops only where its own freezing pass has
    made them, and asserts otherwise. Called through inductor's own node, a product is one C call; an op of ours around
    it would take 25-100 us, and the node as inductor makes it copies the weight, whose packed layout it cannot see."""
    from torch._inductor import lowering

    lowering.lowerings[_packed_product] = _lower_packed_product
    lowering.lowerings[_packed_product_with_residual] = _lower_packed_product_with_residual


def _lower_packed_product(x: Any, weight: Any, bias: Any, attr: str, scalars: Any, algorithm: str) -> Any:
    from torch._inductor import mkldnn_ir

    return _packed_node(mkldnn_ir.LinearUnary, [x], weight, bias, [attr, scalars or [-1], algorithm])


def _lower_packed_product_with_residual(x: Any, other: Any, weight: Any, bias: Any, attr: str) -> Any:
    from torch._inductor import mkldnn_ir

    return _packed_node(mkldnn_ir.LinearBinary, [x, other], weight, bias, [attr])


def _packed_node(node: Any, rows: list[Any], weight: Any, bias: Any, constants: list[Any]) -> Any:
    """What the node's own `create` makes, but for the weight's layout."""
    from torch._inductor import ir, mkldnn_ir

    rows = [node.require_contiguous(node.realize_input(x)) for x in rows]
    weight = node.realize_input(weight)
    x = rows[0]
    layout = ir.FixedLayout(device=x.get_device(), dtype=x.get_dtype(), size=[*x.get_size()[:-1], weight.get_size()[0]])
    inputs = [*rows, weight]
    if bias is None:
        constants = [None, *constants]
    else:
        inputs.append(node.require_contiguous(node.realize_input(bias)))
    return ir.TensorBox.create(
        mkldnn_ir._create_output_node(node(layout=layout, inputs=inputs, constant_args=constants))  # pyright: ignore[reportPrivateUsage]
    )


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


def _packing_rows(dtype: torch.dtype) -> int:
    """The number of rows that oneDNN is told to pack for. Products of 1 to 32 rows are up to a third faster in the
    order for one number than in that for another; which is best differs by format and processor (decision 0007)."""
    if dtype == torch.bfloat16:
        return 8
    return 64 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 32


class PackedLinear(nn.Module):
    """One or several linear layers with a common input, as a single product.

    `weights` are [out_i, in]; the output is [..., sum of out_i]. Biases are all given or all absent.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, *weights: Tensor, biases: tuple[Tensor, ...] = ()) -> None:
        super().__init__()
        parts = [w.detach() for w in weights]
        weight = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
        bias = torch.cat([b.detach() for b in biases]).to(weight.dtype) if biases else None
        self.is_packed = can_pack(weight)
        if self.is_packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, _packing_rows(weight.dtype))
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
    """Gated feed-forward: down(activation(gate x) * up x), gate and up as one product; SwiGLU by default."""

    def __init__(
        self, gate: Tensor, up: Tensor, down: Tensor, *, activation: Callable[[Tensor], Tensor] = F.silu
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_up = PackedLinear(gate, up)
        self.down = PackedLinear(down)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(self.activation(gate) * up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in the half-split form; cos and sin broadcast against x [..., head_dim]."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin

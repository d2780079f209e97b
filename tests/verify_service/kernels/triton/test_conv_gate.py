"""Convolution and gates against the plain twin, which is itself compared with the CPU path's convolution."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from draftwood.errors import UnsupportedModelError
from tests.kernels.trees import Trees, poisoned
from tests.verify_service.oracles import path_to, relative_error
from verify_service.kernels.reference.tree_conv import tree_conv
from verify_service.kernels.triton.conv_gate import Gates, conv_gate, conv_gate_plain

# The interpreter cuts bfloat16 off where a GPU rounds.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass
class Layer:
    """One layer's inputs, and outputs full of NaN."""

    x: Tensor
    trees: Trees
    window: Tensor
    slots: Tensor
    weight: Tensor
    bias: Tensor | None
    gates: Gates
    inputs: Tensor
    conv: Tensor
    norms: Tensor

    @classmethod
    def draw(
        cls,
        device: torch.device,
        n: int,
        heads: tuple[int, int],
        k: int,
        *,
        dtype: torch.dtype,
        kernel_size: int = 4,
        bias: bool = False,
    ) -> Layer:
        (hk, hv), b = heads, 2
        torch.manual_seed(n)
        channels = 2 * hk * k + hv * 24
        # As a fused projection gives them: one row holds all, and more.
        row = torch.randn(b, n, channels + 2 * hv + 3).to(device, dtype)
        x, step, write, _ = row.split([channels, hv, hv, 3], -1)
        window = poisoned(4, kernel_size - 1, channels, dtype=dtype, device=device)
        window[1:3] = torch.randn(2, kernel_size - 1, channels).to(device, dtype)
        gates = Gates(
            step * 3, write, -torch.rand(hv, device=device), torch.randn(hv, device=device),
            poisoned(b, n, hv, device=device), poisoned(b, n, hv, device=device),
        )  # fmt: skip
        return cls(
            x,
            Trees.draw(n, b, n, device, spare=n // 4),
            window,
            torch.tensor([2, 1], dtype=torch.int32, device=device),
            torch.randn(kernel_size, channels, device=device),
            torch.randn(channels, device=device) if bias else None,
            gates,
            poisoned(b, n, channels, dtype=dtype, device=device),
            poisoned(b, n, channels, dtype=dtype, device=device),
            poisoned(b, n, 2 * hk, device=device),
        )

    def fresh(self) -> Layer:
        """The same inputs with outputs of its own."""

        def empty(t: Tensor) -> Tensor:
            return torch.full_like(t, torch.nan)

        gates = replace(self.gates, g=empty(self.gates.g), beta=empty(self.gates.beta))
        return replace(self, inputs=empty(self.inputs), conv=empty(self.conv), norms=empty(self.norms), gates=gates)

    def run(self, kernel: object, *, key_dim: int, silu: bool = True, gated: bool = True) -> dict[str, Tensor]:
        assert callable(kernel)
        kernel(
            self.x, self.trees.parents, self.window, self.slots, self.weight, self.bias, self.inputs, self.conv,
            norms=self.norms if key_dim else None, key_dim=key_dim, gates=self.gates if gated else None, silu=silu,
        )  # fmt: skip
        written = {"inputs": self.inputs, "conv": self.conv}
        if key_dim:
            written["norms"] = self.norms
        if gated:
            written |= {"g": self.gates.g, "beta": self.gates.beta}
        return written


def compare(layer: Layer, *, key_dim: int, silu: bool = True, gated: bool = True) -> None:
    other = layer.fresh()
    got = layer.run(conv_gate, key_dim=key_dim, silu=silu, gated=gated)
    wanted = other.run(conv_gate_plain, key_dim=key_dim, silu=silu, gated=gated)
    for name, tensor in got.items():
        assert relative_error(tensor, wanted[name].double()) < TOLERANCE[layer.x.dtype], name
    assert torch.equal(got["inputs"], layer.x)


@pytest.mark.parametrize(
    ("n", "dtype"), [*((n, torch.float32) for n in (1, 2, 33)), *((13, dtype) for dtype in TOLERANCE)]
)
def test_gated_delta_net(n: int, dtype: torch.dtype, device: torch.device) -> None:
    compare(Layer.draw(device, n, (2, 6), 16, dtype=dtype), key_dim=16)


@pytest.mark.parametrize("kernel_size", [2, 3, 4])
def test_mamba2_has_a_bias_and_limits(kernel_size: int, device: torch.device) -> None:
    layer = Layer.draw(device, 11, (1, 5), 20, dtype=torch.float32, kernel_size=kernel_size, bias=True)
    for limits in ((0.0, math.inf), (0.1, 1.5)):
        compare(replace(layer, gates=replace(layer.gates, write=None, limits=limits)), key_dim=0)
    assert float(layer.gates.beta.min()) >= 0.1
    assert float(layer.gates.beta.max()) <= 1.5


def test_short_convolution_has_neither_gates_nor_activation(device: torch.device) -> None:
    compare(Layer.draw(device, 9, (1, 3), 20, dtype=torch.float32, kernel_size=3), key_dim=0, silu=False, gated=False)


@pytest.mark.parametrize("kernel_size", [2, 4])
def test_twin_is_the_cpu_path(kernel_size: int) -> None:
    layer = Layer.draw(torch.device("cpu"), 17, (1, 3), 20, dtype=torch.float32, kernel_size=kernel_size, bias=True)
    layer.run(conv_gate_plain, key_dim=0, gated=False)
    for b, tree in enumerate(layer.trees.parents_of):
        index = torch.zeros(1, len(tree), kernel_size, dtype=torch.int64)
        for i in range(len(tree)):
            path = [*range(kernel_size - 1), *(node + kernel_size - 1 for node in path_to(tree, i))]
            index[0, i] = torch.tensor(path[-kernel_size:])
        window = layer.window[layer.slots[b]][None]
        wanted = tree_conv(layer.x[b : b + 1, : len(tree)], window, index, layer.weight, layer.bias)
        torch.testing.assert_close(layer.conv[b : b + 1, : len(tree)], wanted)


def test_small_time_steps_keep_their_digits(device: torch.device) -> None:
    """log(1 + y) of small y, the rates of heads that forget slowly."""
    layer = Layer.draw(device, 3, (1, 3), 16, dtype=torch.float32)
    layer.gates.dt_bias.fill_(-12.0)
    layer.run(conv_gate, key_dim=16)
    step = layer.gates.step.double() + layer.gates.dt_bias.double()
    wanted = layer.gates.decay.double() * torch.nn.functional.softplus(step)
    assert relative_error(layer.gates.g, wanted) < 1e-6


def test_shapes_that_are_refused(device: torch.device) -> None:
    layer = Layer.draw(device, 3, (1, 3), 20, dtype=torch.float32)
    with pytest.raises(UnsupportedModelError, match="linear_key_head_dim must be 16, 32, 64, 128 or 256, not 20"):
        layer.run(conv_gate, key_dim=20)
    layer = Layer.draw(device, 3, (1, 3), 16, dtype=torch.float32, kernel_size=5)
    with pytest.raises(UnsupportedModelError, match="conv_kernel must be 2 to 4, not 5"):
        layer.run(conv_gate, key_dim=16)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 16, 64, 256])
def test_served_sizes(n: int, device: torch.device) -> None:
    compare(Layer.draw(device, n, (16, 48), 128, dtype=torch.bfloat16), key_dim=128)

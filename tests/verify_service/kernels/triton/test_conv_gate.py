"""Convolution and gates against the plain twin, which is itself compared with the CPU path's convolution."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from draftwood.errors import UnsupportedModelError
from tests.kernels.trees import Trees, poisoned
from tests.verify_service.oracles import path_to, relative_error
from verify_service.kernels.arguments import Convolution, Gates, LayerCommitInputs
from verify_service.kernels.reference import conv_gate as reference
from verify_service.kernels.reference.conv_gate import tree_conv
from verify_service.kernels.triton.conv_gate import conv_gate

# The interpreter cuts bfloat16 off where a GPU rounds.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass
class Layer:
    """One layer's inputs, and outputs full of NaN."""

    x: Tensor
    trees: Trees
    windows: Tensor
    convolution: Convolution
    gates: Gates
    written: LayerCommitInputs

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
        windows = poisoned(4, kernel_size - 1, channels, dtype=dtype, device=device)
        windows[1:3] = torch.randn(2, kernel_size - 1, channels).to(device, dtype)
        decay, dt_bias = -torch.rand(hv, device=device), torch.randn(hv, device=device)
        weight = torch.randn(kernel_size, channels, device=device)
        return cls(
            x,
            Trees.draw(n, b, n, device, spare=n // 4),
            windows,
            Convolution(weight, torch.randn(channels, device=device) if bias else None),
            Gates(step * 3, write, decay, dt_bias),
            LayerCommitInputs(
                inputs=poisoned(b, n, channels, dtype=dtype, device=device),
                conv=poisoned(b, n, channels, dtype=dtype, device=device),
                norms=poisoned(b, n, 2 * hk, device=device),
                g=poisoned(b, n, hv, device=device),
                beta=poisoned(b, n, hv, device=device),
            ),
        )

    def run(
        self, kernel: Callable[..., None], *, key_dim: int, silu: bool = True, gated: bool = True
    ) -> dict[str, Tensor]:
        """What the kernel writes, into memory full of NaN."""
        names = ("inputs", "conv", *(("norms",) if key_dim else ()), *(("g", "beta") if gated else ()))
        written = {name: torch.full_like(getattr(self.written, name), torch.nan) for name in names}
        commit_inputs = replace(self.written, **({"norms": None} | written))
        convolution, gates = replace(self.convolution, silu=silu), self.gates if gated else None
        kernel(self.x, self.trees.metadata, self.windows, convolution, gates, commit_inputs, key_dim=key_dim)
        return written


def compare(layer: Layer, *, key_dim: int, silu: bool = True, gated: bool = True) -> dict[str, Tensor]:
    got = layer.run(conv_gate, key_dim=key_dim, silu=silu, gated=gated)
    wanted = layer.run(reference.conv_gate, key_dim=key_dim, silu=silu, gated=gated)
    for name, tensor in got.items():
        assert relative_error(tensor, wanted[name].double()) < TOLERANCE[layer.x.dtype], name
    assert torch.equal(got["inputs"], layer.x)
    return got


@pytest.mark.parametrize(
    ("n", "dtype"), [*((n, torch.float32) for n in (1, 2, 33)), *((13, dtype) for dtype in TOLERANCE)]
)
def test_gated_delta_net(n: int, dtype: torch.dtype, device: torch.device) -> None:
    compare(Layer.draw(device, n, (2, 6), 16, dtype=dtype), key_dim=16)


@pytest.mark.parametrize("kernel_size", [2, 3, 4])
def test_mamba2_has_a_bias_and_limits(kernel_size: int, device: torch.device) -> None:
    layer = Layer.draw(device, 11, (1, 5), 20, dtype=torch.float32, kernel_size=kernel_size, bias=True)
    for limits in ((0.0, math.inf), (0.1, 1.5)):
        beta = compare(replace(layer, gates=replace(layer.gates, write=None, limits=limits)), key_dim=0)["beta"]
        assert limits[0] <= float(beta.min())
        assert float(beta.max()) <= limits[1]


def test_short_convolution_has_neither_gates_nor_activation(device: torch.device) -> None:
    compare(Layer.draw(device, 9, (1, 3), 20, dtype=torch.float32, kernel_size=3), key_dim=0, silu=False, gated=False)


@pytest.mark.parametrize("kernel_size", [2, 4])
def test_twin_is_the_cpu_path(kernel_size: int) -> None:
    layer = Layer.draw(torch.device("cpu"), 17, (1, 3), 20, dtype=torch.float32, kernel_size=kernel_size, bias=True)
    conv = layer.run(reference.conv_gate, key_dim=0, gated=False)["conv"]
    for b, tree in enumerate(layer.trees.parents_of):
        index = torch.zeros(1, len(tree), kernel_size, dtype=torch.int64)
        for i in range(len(tree)):
            path = [*range(kernel_size - 1), *(node + kernel_size - 1 for node in path_to(tree, i))]
            index[0, i] = torch.tensor(path[-kernel_size:])
        window = layer.windows[layer.trees.metadata.state_slots[b]][None]
        x, weight, bias = layer.x[b : b + 1, : len(tree)], layer.convolution.weight, layer.convolution.bias
        torch.testing.assert_close(conv[b : b + 1, : len(tree)], tree_conv(x, window, index, weight, bias))


def test_small_time_steps_keep_their_digits(device: torch.device) -> None:
    """log(1 + y) of small y, the rates of heads that forget slowly."""
    layer = Layer.draw(device, 3, (1, 3), 16, dtype=torch.float32)
    layer.gates.dt_bias.fill_(-12.0)
    g = layer.run(conv_gate, key_dim=16)["g"]
    step = layer.gates.step.double() + layer.gates.dt_bias.double()
    wanted = layer.gates.decay.double() * torch.nn.functional.softplus(step)
    assert relative_error(g, wanted) < 1e-6


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

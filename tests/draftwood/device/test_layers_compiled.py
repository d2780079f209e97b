"""Compiled graphs over packed products give what the same layers give eagerly, for any number of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood.device.compilation import compiled
from draftwood.device.layers import GatedMLP, PackedLinear, RMSNorm


class Block(torch.nn.Module):
    """A product with biases, one with a residual behind it, and a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)

        def new(*size: int) -> Tensor:
            return torch.randn(size, generator=g) / 6

        self.first = PackedLinear(new(24, 32), new(8, 32), biases=(new(24), new(8)))
        self.second = PackedLinear(new(32, 32))
        self.norm = RMSNorm(torch.ones(32), 1e-6)
        self.mlp = GatedMLP(new(48, 32), new(48, 32), new(32, 48))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.second(self.first(self.norm(x)))
        return x + self.mlp(x)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_compiled_layers_equal_eager_ones(num_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # an older graph would hide what our lowering makes
    block = Block()
    run = compiled(block.forward, enabled=True)
    mark: Any = torch._dynamo.maybe_mark_dynamic  # pyright: ignore[reportPrivateUsage]
    with torch.inference_mode():
        for n in (num_rows, 3 * num_rows + 1 if num_rows > 1 else 1):
            x = torch.randn(1, n, 32, generator=torch.Generator().manual_seed(n))
            if n > 1:
                mark(x, 1)
            torch.testing.assert_close(run(x), block(x), rtol=1e-5, atol=1e-6)


def test_packed_layers_are_their_weights() -> None:
    g = torch.Generator().manual_seed(1)
    weights, biases = torch.randn(2, 12, 16, generator=g).unbind(), torch.randn(2, 12, generator=g).unbind()
    x = torch.randn(3, 16, generator=g)
    wanted = torch.cat([F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)], -1)
    torch.testing.assert_close(PackedLinear(*weights, biases=biases)(x), wanted)

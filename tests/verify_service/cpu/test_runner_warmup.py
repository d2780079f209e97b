"""What the warm-up runs before the first request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from draftwood.device.layers import PackedLinear
from tests.verify_service.harness import config_of
from tests.verify_service.models import save_tiny
from verify_service.build import build
from verify_service.core.sequence import PREFILL_CHUNK
from verify_service.cpu.runner import WARM_ROWS, shapes_by_rows
from verify_service.cpu.step_inputs import padded


@pytest.mark.parametrize("max_batch", [1, 3, 8])
def test_every_number_of_rows_has_a_pass(max_batch: int) -> None:
    shapes = shapes_by_rows(max_batch, WARM_ROWS)
    assert all(b * n == rows <= WARM_ROWS for rows, (b, n) in shapes.items())
    assert {(b, padded(max(n, 2 if b > 1 else 1))) for b, n in shapes.values()} == set(shapes.values())
    wanted = {
        b * padded(max(n, 2 if b > 1 else 1)) for b in range(1, max_batch + 1) for n in range(1, PREFILL_CHUNK + 1)
    }
    assert set(shapes) == {rows for rows in wanted if rows <= WARM_ROWS}


def test_products_of_every_number_of_rows_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each shape, whatever layer has it."""
    mixers = ["linear_attention", "linear_attention", "full_attention"] * 3
    save_tiny("qwen3_5_text", tmp_path, num_hidden_layers=9, layer_types=mixers)
    service = build(config_of(tmp_path, max_batch=3))
    made: set[tuple[tuple[int, ...], int]] = set()
    forward: Callable[[PackedLinear, Tensor], Tensor] = PackedLinear.forward

    def spy(self: PackedLinear, x: Tensor) -> Tensor:
        made.add((tuple(self.weight.shape), x.shape[:-1].numel()))
        return forward(self, x)

    monkeypatch.setattr(PackedLinear, "forward", spy)
    service.warm_up()
    kinds = {sizes for sizes, _ in made}
    assert len(kinds) > 3
    assert {(sizes, rows) for sizes in kinds for rows in shapes_by_rows(3, WARM_ROWS)} <= made

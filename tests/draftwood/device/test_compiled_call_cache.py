"""Direct calls give what the compiled function gives, and are made only where that is sure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import output_code

from draftwood.device.compilation import compiled
from draftwood.device.compiled_call_cache import CompiledCallCache
from draftwood.device.layers import RMSNorm


def scaled(x: Tensor, weight: Tensor) -> list[Tensor]:
    return [x * weight, (x + weight).sum(0, keepdim=True)]


def plus_rows(x: Tensor, weight: Tensor) -> list[Tensor]:
    return [x * weight + x.shape[0] * 4]


def count_up(state: Tensor, step: Tensor) -> None:
    state.add_(step)


class Counted:
    """A compiled function that counts its calls."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self.function, self.count = compiled(function, enabled=True, **options), 0

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        return self.function(*args)


@pytest.fixture(scope="module")
def scale() -> Counted:
    return Counted(scaled, dynamic=True)


@torch.inference_mode()
def test_later_calls_are_the_graphs_own(scale: Counted) -> None:
    direct, weights = CompiledCallCache(), [torch.randn(4), torch.randn(4)]
    for turn in range(3):
        for which, weight in enumerate(weights):
            for rows in (3, 6):
                x, before = torch.randn(rows, 4), scale.count
                out = direct.call((rows, which), (x,), lambda x=x, w=weight: scale(x, w), lambda w=weight: (w,))
                assert out is not None
                assert all(torch.equal(a, b) for a, b in zip(out, scaled(x, weight), strict=True))
                assert scale.count - before == (1 if turn == 0 else 0)


@torch.inference_mode()
def test_changes_in_place_are_made(scale: Counted) -> None:
    del scale
    count, direct = Counted(count_up, dynamic=False), CompiledCallCache()
    pool = torch.zeros(5, 3)
    for turn in range(1, 5):
        state, step = pool[turn % 2 + 1], torch.full((3,), float(turn))
        assert direct.call("one", (state, step), lambda s=state, t=step: count(s, t)) is None
    assert pool.tolist() == [[0.0] * 3, [6.0] * 3, [4.0] * 3, [0.0] * 3, [0.0] * 3]
    assert count.count == 1


@torch.inference_mode()
def test_a_tensor_that_nobody_named_keeps_the_checks(scale: Counted) -> None:
    """It may be another one in the next call."""
    direct = CompiledCallCache()
    for _ in range(3):
        x, weight, before = torch.randn(3, 4), torch.randn(4), scale.count
        out = direct.call("key", (x,), lambda x=x, w=weight: scale(x, w))
        assert out is not None
        assert torch.equal(out[0], x * weight)
        assert scale.count == before + 1


@torch.inference_mode()
def test_work_around_a_graph_keeps_the_checks(scale: Counted) -> None:
    direct = CompiledCallCache()

    def doubled(x: Tensor, weight: Tensor) -> list[Tensor]:
        return [2 * part for part in scale(x, weight)]

    def twice(x: Tensor, weight: Tensor) -> list[Tensor]:
        scale(x, weight)
        return scale(x, weight)

    for function, factor in ((doubled, 2), (twice, 1), (scaled, 1)):
        for _ in range(3):
            x, weight = torch.randn(3, 4), torch.randn(4)
            out = direct.call(function, (x, weight), lambda f=function, x=x, w=weight: f(x, w))
            assert out is not None
            assert torch.equal(out[0], factor * (x * weight))


@torch.inference_mode()
def test_sizes_vary_without_another_graph(scale: Counted) -> None:
    """Two calls of different sizes go by the checks."""
    counted = Counted(plus_rows, dynamic=True)
    direct, weight = CompiledCallCache(), torch.randn(4)
    for turn, rows in enumerate((6, 6, 7, 9, 6, 30)):
        x, before = torch.randn(rows, 4), counted.count
        out = direct.call("key", (x,), lambda x=x: counted(x, weight), lambda: (weight,), sizes=(rows,))
        assert out is not None
        assert torch.equal(out[0], x * weight + rows * 4)
        assert counted.count - before == (1 if turn < 3 else 0)
    del scale


@torch.inference_mode()
def test_sizes_that_nobody_named_keep_the_checks(scale: Counted) -> None:
    direct, weight = CompiledCallCache(), torch.randn(4)
    for rows in (3, 5, 7, 9):
        x, before = torch.randn(rows, 4), scale.count
        out = direct.call("key", (x,), lambda x=x: scale(x, weight), lambda: (weight,), sizes=(rows + 1,))
        assert out is not None
        assert torch.equal(out[0], x * weight)
        assert scale.count == before + 1


@torch.inference_mode()
def test_models_of_one_shape_have_graphs_of_their_own() -> None:
    """Guards on modules are off: what differs between them must not come from the first."""

    def make(norm: RMSNorm) -> Callable[[Tensor], list[Tensor]]:
        def run(x: Tensor) -> list[Tensor]:
            return [norm(x)]

        return compiled(run, enabled=True)

    x = torch.randn(3, 4)
    for eps in (1e-6, 1.0):
        norm = RMSNorm(torch.ones(4), eps)
        torch.testing.assert_close(make(norm)(x)[0], norm(x))


class OtherGraph:
    """Of a torch that keeps what it calls elsewhere."""

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        return [2 * inputs.pop()]


@pytest.mark.parametrize("graph", [None, OtherGraph])
def test_another_torch_keeps_the_checks(graph: type[OtherGraph] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if graph is None:
        monkeypatch.delattr(output_code, "CompiledFxGraph")
    else:
        monkeypatch.setattr(output_code, "CompiledFxGraph", graph)
    direct, calls = CompiledCallCache(), list[Tensor]()
    for turn in range(3):
        x = torch.full((3,), float(turn))

        def run(x: Tensor = x) -> list[Tensor]:
            calls.append(x)
            return OtherGraph()([x])

        out = direct.call("key", (x,), run)
        assert out is not None
        assert torch.equal(out[0], 2 * x)
    assert len(calls) == 3


@torch.inference_mode()
def test_an_error_is_remembered_as_nothing(scale: Counted) -> None:
    direct = CompiledCallCache()
    with pytest.raises(ValueError, match="first"):
        direct.call("key", (), _fails)
    x, weight = torch.randn(3, 4), torch.randn(4)
    for _ in range(2):
        out = direct.call("key", (x, weight), lambda: scale(x, weight))
        assert out is not None
        assert torch.equal(out[0], x * weight)


def _fails() -> None:
    raise ValueError("first")

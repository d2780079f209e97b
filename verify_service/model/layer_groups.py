"""Groups of consecutive layers, each run as one compiled graph; groups of one kind share their graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from draftwood.device.compilation import compiled
from verify_service.model.rope import Rotation


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Consecutive layers; `run` takes them, the residual stream, and what a pass has for them."""

    first: int
    layers: tuple[Any, ...]
    kinds: tuple[str | None, ...]  # what their graph depends on
    run: Callable[..., list[Tensor]]

    def of(self, arguments: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The group's part of what all layers have."""
        return arguments[self.first : self.first + len(self.layers)]


def kind_of(layer: nn.Module) -> str:
    """What the layer's graph depends on, in words: classes, shapes and settings such as a window, down to its parts.
    Layers of one kind differ in their weights' values only."""
    parts: list[str] = []
    for name, module in layer.named_modules():
        plain = {k: v for k, v in vars(module).items() if v is None or isinstance(v, bool | int | float | str)}
        plain.pop("layer_idx", None)
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        shapes = [(k, list(tensor.shape)) for k, tensor in tensors]
        parts.append(f"{name} {type(module).__name__} {sorted(plain.items())} {sorted(shapes)}")
    return "\n".join(parts)


class LayerGroups:
    """Cuts layers into groups. `kinds` tells layers apart whose graphs differ; None: a layer of no graph."""

    def __init__(
        self,
        layers: Sequence[Any],
        kinds: Sequence[str | None],
        *,
        compile_steps: bool,
        cpp_wrapper: bool = True,
        run: Callable[..., list[Tensor]] | None = None,
    ) -> None:
        """`run` takes what a group's does, if not the residual stream alone goes from layer to layer."""
        self.layers, self.kinds, self._run = layers, kinds, run or _run
        self.compile_steps, self.cpp_wrapper = compile_steps, cpp_wrapper
        self._graphs: dict[tuple[str | None, ...], Callable[..., list[Tensor]]] = {}

    def group_layers(self, length: int) -> list[LayerGroup]:
        """Groups of at most `length` layers; a layer of no graph stands alone."""
        groups: list[LayerGroup] = []
        first = 0
        while first < len(self.layers):
            end = first + 1
            while end < min(first + length, len(self.layers)) and None not in self.kinds[first : end + 1]:
                end += 1
            kinds = tuple(self.kinds[first:end])
            groups.append(LayerGroup(first, tuple(self.layers[first:end]), kinds, self._graph(kinds)))
            first = end
        return groups

    def _graph(self, kinds: tuple[str | None, ...]) -> Callable[..., list[Tensor]]:
        if None in kinds:
            return self._run
        if kinds not in self._graphs:
            self._graphs[kinds] = compiled(self._run, enabled=self.compile_steps, cpp_wrapper=self.cpp_wrapper)
        return self._graphs[kinds]


def _run(
    layers: Sequence[Any],
    hidden: Tensor,  # [B, N, H]
    rope: Rotation,
    step: Any,  # what the pass has for all layers
    arguments: Sequence[dict[str, Any]],  # of each layer
) -> list[Tensor]:  # [B, N, H] each
    """The residual stream after each layer."""
    after: list[Tensor] = []
    for layer, own in zip(layers, arguments, strict=True):
        out = layer(hidden, position_embeddings=rope, attention_mask=None, cache=None, step=step, **own)
        hidden = out[0] if isinstance(out, tuple) else out  # some families' layers return attention weights as well
        after.append(hidden)
    return after

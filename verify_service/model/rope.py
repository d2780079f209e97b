"""Rotary embeddings: tables of every position in the model's own definition, one for each kind of layer that has one.

Committed keys stay as they were rotated, so that only definitions that do not depend on the length can be served.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from draftwood.errors import UnsupportedModelError

Rope = tuple[Tensor, Tensor]  # cos and sin, each [..., rotary dim]
Rotation = Rope | dict[str, Rope] | None  # by layer type where they differ; None without rotation

MAX_DEPTH_MARGIN = 512  # positions of nodes behind the longest context
SERVED_TYPES = ("default", "linear", "llama3", "yarn")


def check_rope(config: Any) -> None:
    """Raises UnsupportedModelError naming the rope type that is not served, and where it stands."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = {k: v for k, v in parameters.items() if isinstance(v, dict)}
    for layer_type, own in by_layer_type.items() if by_layer_type else [("", parameters)]:
        kind = own.get("rope_type", "default")
        if kind not in SERVED_TYPES:
            field = ".".join(part for part in ("rope_parameters", layer_type, "rope_type") if part)
            raise UnsupportedModelError(
                f"{field} is {kind!r}, which is not supported (supported: {', '.join(SERVED_TYPES)})", field=field
            )


class RopeTables:
    """Tables of `length` positions; one for each of the layers' types where the model has it so, none where `rotary` is
    None."""

    def __init__(self, rotary: Any, layer_types: Sequence[str], length: int, x: Tensor) -> None:
        """`x` has the model's format and device."""
        self._tables: dict[str, Rope] = {}
        self.differs = rotary is not None and isinstance(rotary.rope_type, dict)
        if rotary is None:
            return
        positions = torch.arange(length, device=x.device)[None]
        if hasattr(rotary, "mrope_section"):  # text positions are the same in all three of its dimensions
            positions = positions.expand(3, 1, -1)
        for kind in dict.fromkeys(layer_types if self.differs else ("",)):
            cos, sin = rotary(x, positions, kind) if kind else rotary(x, positions)
            self._tables[kind] = cos[0], sin[0]

    def at(self, positions: Tensor) -> Rotation:
        """cos and sin of the positions [B, N]."""
        at = {kind: (cos[positions], sin[positions]) for kind, (cos, sin) in self._tables.items()}
        return at if self.differs else at.get("")

    def picking(self, layer: nn.Module, layer_type: str) -> nn.Module:
        """The decoder layer in a form that takes what `at` returns."""
        return _PickingLayer(layer, layer_type) if self.differs else layer


def angles(rope: Rotation) -> Iterable[Tensor]:
    """All tensors of it."""
    return chain(*rope.values()) if isinstance(rope, dict) else rope or ()


class _PickingLayer(nn.Module):
    def __init__(self, layer: nn.Module, layer_type: str) -> None:
        super().__init__()
        self.layer, self.layer_type = layer, layer_type

    def forward(self, hidden: Tensor, position_embeddings: dict[str, Rope], **arguments: Any) -> Tensor:
        return self.layer(hidden, position_embeddings=position_embeddings[self.layer_type], **arguments)

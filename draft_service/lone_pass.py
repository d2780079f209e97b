"""The draft model's pass over one sequence's block as one compiled graph, for contexts of any length."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from draft_service.block import BlockInputs
from draft_service.model import DraftModel
from draftwood.device import compiled
from draftwood.direct_calls import DirectCalls


class LonePass:
    """DraftModel.forward."""

    def __init__(self, model: DraftModel, *, compile_steps: bool) -> None:
        def forward(*inputs: Any) -> list[Tensor]:
            return [model.forward(*inputs)]

        self._model = model
        self._forward = compiled(forward, enabled=compile_steps)
        self._calls = DirectCalls()

    def __call__(
        self,
        x: Tensor,  # [1, N, H] embedded block
        inputs: BlockInputs,
    ) -> Tensor:  # [1, N, H]
        """Final hidden states."""
        masks = [mask for mask in inputs.masks if mask is not None]

        def run() -> list[Tensor]:
            mark: Any = torch._dynamo.maybe_mark_dynamic  # pyright: ignore[reportPrivateUsage]
            for tensor in (inputs.keys, inputs.values, *masks):
                mark(tensor, 3)
            return self._forward(x, inputs.cos, inputs.sin, inputs.keys, inputs.values, inputs.masks)

        def constants() -> Iterable[Tensor]:
            return chain(self._model.parameters(), self._model.buffers())

        varying = (x, inputs.cos, inputs.sin, inputs.keys, inputs.values, *masks)
        key = tuple(mask is None for mask in inputs.masks)
        outputs = self._calls.call(key, varying, run, constants, sizes=(inputs.keys.shape[3],))
        assert outputs is not None
        return outputs[0]

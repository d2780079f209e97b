"""The draft model's pass over blocks as compiled graphs: one for a lone sequence, one for several, for contexts of any
length."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import Tensor

from draft_service.cpu.block import BlockInputs
from draft_service.model.draft_model import DraftModel
from draftwood.device.compilation import compiled, mark_varying
from draftwood.device.compiled_call_cache import CompiledCallCache


class BlockPass:
    """DraftModel.forward."""

    def __init__(self, model: DraftModel, *, compile_steps: bool) -> None:
        def forward(*inputs: Any) -> list[Tensor]:
            return [model.forward(*inputs)]

        self._model = model
        self._alone = compiled(forward, enabled=compile_steps)
        # Loops over so many rows are long enough for two threads.
        self._several = compiled(forward, enabled=compile_steps, threaded_loops=True)
        self._calls = CompiledCallCache()

    def __call__(
        self,
        x: Tensor,  # [S, N, H] embedded blocks
        inputs: BlockInputs,
    ) -> Tensor:  # [S, N, H]
        """Final hidden states."""
        s, n, _ = x.shape
        if inputs.keys.shape[3] == n:  # no context: a size that is another's, too, would be compiled anew
            return self._model.forward(x, inputs.cos, inputs.sin, inputs.keys, inputs.values, inputs.masks)
        masks = [mask for mask in inputs.masks if mask is not None]
        varying = (x, inputs.cos, inputs.sin, inputs.keys, inputs.values, *masks)

        def run() -> list[Tensor]:
            for tensor in (inputs.keys, inputs.values, *masks):
                mark_varying(tensor, 3)
            if s == 1:
                return self._alone(x, inputs.cos, inputs.sin, inputs.keys, inputs.values, inputs.masks)
            for tensor in (x, inputs.cos, inputs.sin, *masks):
                mark_varying(tensor, 0)
            for tensor in (inputs.keys, inputs.values):
                mark_varying(tensor, 1)
            return self._several(x, inputs.cos, inputs.sin, inputs.keys, inputs.values, inputs.masks)

        def constants() -> Iterable[Tensor]:
            return chain(self._model.parameters(), self._model.buffers())

        key = (s, tuple(mask is None for mask in inputs.masks))
        outputs = self._calls.call(key, varying, run, constants, sizes=(inputs.keys.shape[3],))
        assert outputs is not None
        return outputs[0]

"""Keys and values of few feature rows as one compiled graph: what every step of a CPU's drafter begins with."""

from __future__ import annotations

import torch
from torch import Tensor

from draft_service.model.draft_model import DraftModel
from draftwood.device.compilation import compiled, mark_varying
from draftwood.device.compiled_call_cache import CompiledCallCache

FEW = 64  # rows; more are a prompt's, whose products take longer than what a graph saves


class ContextProjection:
    """DraftModel.context; few rows are padded to a multiple of four, so that they are few shapes."""

    def __init__(self, model: DraftModel, *, compile_steps: bool) -> None:
        def context(rows: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
            return list(model.context(rows, cos, sin))

        self._model, self._is_compiled = model, compile_steps and model.device.type == "cpu"
        self._context = compiled(context, enabled=self._is_compiled)
        self._constants = (*model.context_kv.buffers(), model.context_k_norms)
        self._calls = CompiledCallCache()

    def __call__(
        self,
        rows: Tensor,  # [n, H]
        cos: Tensor,  # [n, D]
        sin: Tensor,  # [n, D]
    ) -> tuple[Tensor, Tensor]:  # [n, L, G, D] each
        """As DraftModel.context."""
        n = rows.shape[0]
        if not self._is_compiled or n > FEW:
            return self._model.context(rows, cos, sin)
        varying = [_padded(part) for part in (rows, cos, sin)]

        def run() -> list[Tensor]:
            for part in varying:
                mark_varying(part, 0)
            return self._context(*varying)

        outputs = self._calls.call(varying[0].shape[0], varying, run, lambda: self._constants)
        assert outputs is not None
        keys, values = outputs
        return keys[:n], values[:n]


def _padded(part: Tensor) -> Tensor:
    spare = -part.shape[0] % 4
    return torch.cat([part, part[:1].expand(spare, -1)]) if spare else part

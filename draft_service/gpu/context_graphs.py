"""Keys and values of newly committed tokens as one graph per number of rows, into the slots of the context cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draft_service.cache.context_cache import CachedSequence, ContextCache
from draft_service.model.draft_model import DraftModel
from draftwood.device.graphs import Graphs

ROWS = (16, 64)


class ContextProgram:
    """At most n rows, of whichever sequences; spare ones go into the row of a slot that nobody reads."""

    def __init__(
        self, model: DraftModel, cache: ContextCache, rotation: tuple[Tensor, Tensor], graphs: Graphs, n: int
    ) -> None:
        self.model, self.cache, self.rotation = model, cache, rotation
        is_cuda = model.device.type == "cuda"
        width = model.config.hidden_size
        self.host_rows = torch.zeros(n, width, dtype=model.dtype, pin_memory=is_cuda)
        self.host = torch.zeros(3, n, dtype=torch.int64, pin_memory=is_cuda)  # positions, slots, rows in the slot
        self._rows, self._places = self.host_rows.to(model.device), self.host.to(model.device)
        self.host[2] = cache.keys.shape[3] - 1
        self.run = graphs.captured(self._run)

    def _run(self) -> None:
        self._rows.copy_(self.host_rows, non_blocking=True)
        self._places.copy_(self.host, non_blocking=True)
        at, slots, rows = self._places.unbind(0)
        keys, values = self.model.context(self._rows, self.rotation[0][at], self.rotation[1][at])
        self.cache.keys[:, slots, :, rows] = keys
        self.cache.values[:, slots, :, rows] = values


class ContextGraphs:
    """Programs by number of rows, made when they are first needed."""

    def __init__(self, model: DraftModel, cache: ContextCache, rotation: tuple[Tensor, Tensor], graphs: Graphs) -> None:
        self.model, self.cache, self.rotation, self.graphs = model, cache, rotation, graphs
        self._programs: dict[int, ContextProgram] = {}
        self._done = torch.cuda.Event() if model.device.type == "cuda" else None

    def take(self, fresh: Sequence[tuple[CachedSequence, Tensor]]) -> bool:
        """Caches the next rows [n, H] of some sequences; False, and nothing done, where they are too many."""
        total = sum(rows.shape[0] for _, rows in fresh)
        if total > ROWS[-1]:
            return False
        n = next(size for size in ROWS if size >= total)
        program = self._programs.get(n)
        if program is None:
            program = self._programs[n] = ContextProgram(self.model, self.cache, self.rotation, self.graphs, n)
        if self._done is not None:
            self._done.synchronize()  # the host's rows of the last time have gone
        program.host[2] = self.cache.keys.shape[3] - 1
        at = 0
        for sequence, rows in fresh:
            position, count = sequence.length, rows.shape[0]
            skipped, begin = self.cache.reserve(sequence, count)
            end = at + count - skipped
            program.host_rows[at:end] = rows[skipped:]
            program.host[0, at:end] = torch.arange(position + skipped, position + count)
            program.host[1, at:end] = sequence.slot
            program.host[2, at:end] = torch.arange(begin, begin + end - at)
            at = end
        program.run()
        if self._done is not None:
            self._done.record()
        return True

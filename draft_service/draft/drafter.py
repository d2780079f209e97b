"""The engine: model, context cache and candidates in one thread; values in, values out.

One call serves one message: it frees closed sequences, takes context rows, and drafts for all sequences together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from draft_service.cache.context_cache import CachedSequence, ContextCache, SequenceKey
from draft_service.cpu.context_projection import ContextProjection
from draft_service.draft.context_intake import ContextIntake, Fresh
from draft_service.draft.tree_pass import TreeJob, TreePass
from draft_service.draft.types import ContextRows, Refusal, RefusalReason, SequenceStep, StepOutcome
from draft_service.gpu.block_graphs import BlockGraphs
from draft_service.kernels.kernel_set import KernelSet
from draft_service.model.draft_model import DraftModel
from draft_service.model.rope import rope_tables

SLOTS_PER_PLACE = 2  # a sequence may be prefilled while the one whose place in the batch it takes is still open


class Drafter:
    """Drafts trees for the sequences of all streams. Not thread-safe: one thread makes all the calls."""

    def __init__(
        self,
        model: DraftModel,
        *,
        max_context: int,
        max_batch: int,
        compile: bool = False,
        graphs: bool | None = None,  # whether passes run over static buffers; None: on a GPU
        kernels: KernelSet | None = None,  # that make trees on the device, over static buffers only
    ) -> None:
        self.model, self.config, self.max_batch = model, model.config, max_batch
        self.cache = ContextCache(
            self.config,
            num_slots=SLOTS_PER_PLACE * max_batch,
            max_context=max_context,
            dtype=model.dtype,
            device=model.device,
        )
        self._rotation = rope_tables(self.config, max_context + self.config.block_size, model.dtype, model.device)
        self._contexts = ContextProjection(model, compile_steps=compile)
        self._graphs: BlockGraphs | None = None
        if model.device.type == "cuda" if graphs is None else graphs:
            self._graphs = BlockGraphs(model, self.cache, self._rotation, compile_steps=compile, kernels=kernels)
        self._intake = ContextIntake(self.cache, self._append)
        self._trees = TreePass(
            model, self.cache, self._rotation, self._graphs, max_batch=max_batch, compile_steps=compile
        )

    @torch.inference_mode()
    def step(
        self, stream_id: int, steps: Sequence[SequenceStep], closed: Iterable[int], is_late: Callable[[], bool]
    ) -> StepOutcome:
        """Serves one message. Where `is_late` says so once the rows are in, nothing is drafted."""
        for sequence_id in closed:
            self._intake.close(SequenceKey(stream_id, sequence_id))
        outcome = StepOutcome([None] * len(steps))
        keys = [SequenceKey(stream_id, step.sequence_id) for step in steps]
        for key in keys:
            self._intake.reopen(key)
        taken = self._intake.take([(key, s.epoch, s.context) for key, s in zip(keys, steps, strict=True)])
        ready: list[tuple[int, TreeJob]] = []
        for i, (step, sequence) in enumerate(zip(steps, taken, strict=True)):
            if step.tree is None:
                continue
            refusal = sequence if isinstance(sequence, Refusal) else self._intake.missing(sequence, step.base_length)
            if isinstance(sequence, CachedSequence) and refusal is None:
                ready.append((i, TreeJob(sequence, step.root, step.base_length, step.tree, step.sampling)))
            outcome.results[i] = refusal
        for at in range(0, len(ready), self.max_batch):
            self._draft(ready[at : at + self.max_batch], outcome, is_late)
        return outcome

    @torch.inference_mode()
    def take(self, stream_id: int, sequence_id: int, epoch: int, context: ContextRows) -> Refusal | None:
        """Takes rows ahead of a sequence's first step; None where they are cached now, or the sequence has ended."""
        key = SequenceKey(stream_id, sequence_id)
        if self._intake.is_over(key, epoch):
            return None
        (sequence,) = self._intake.take([(key, epoch, context)])
        return sequence if isinstance(sequence, Refusal) else None

    def close_stream(self, stream_id: int) -> None:
        """Frees all sequences of a stream."""
        self._intake.close_stream(stream_id)

    def _append(self, fresh: Fresh) -> None:
        """Keys and values of all the rows in one product."""
        if self._graphs is not None and self._graphs.contexts.take(fresh):
            return
        rows = torch.cat([part for _, part in fresh]).to(self.model.device, self.model.dtype)  # [n, H]
        counts = [part.shape[0] for _, part in fresh]
        ranges = [(sequence.length, sequence.length + n) for (sequence, _), n in zip(fresh, counts, strict=True)]
        cos, sin = (torch.cat([table[start:end] for start, end in ranges]) for table in self._rotation)  # [n, D] each
        keys, values = self._contexts(rows, cos, sin)  # [n, L, G, D] each
        for (sequence, _), k, v in zip(fresh, keys.split(counts), values.split(counts), strict=True):
            self.cache.append(sequence, k, v)

    def _draft(self, batch: Sequence[tuple[int, TreeJob]], outcome: StepOutcome, is_late: Callable[[], bool]) -> None:
        """One pass, whose results go to the places that the batch names."""
        if is_late():
            late = Refusal(RefusalReason.DEADLINE, "the deadline passed before the draft pass could start")
            for i, _ in batch:
                outcome.results[i] = late
            return
        drafts = self._trees.draft([job for _, job in batch])
        for (i, _), drafted in zip(batch, drafts.results, strict=True):
            outcome.results[i] = drafted
        outcome.draft_s += drafts.draft_s
        outcome.tree_s += drafts.tree_s

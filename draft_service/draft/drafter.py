"""The engine: model, context cache and candidates in one thread; values in, values out.

One call serves one message: it frees closed sequences, takes context rows, and drafts for all sequences together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import Tensor

from draft_service.cache.closed_sequences import ClosedSequences
from draft_service.cache.context_cache import CachedSequence, ContextCache, SequenceKey
from draft_service.cpu.block import BlockAssembler
from draft_service.cpu.block_pass import BlockPass
from draft_service.cpu.context_projection import ContextProjection
from draft_service.draft.candidates import CandidateRanker, Candidates, build_tree, likeliest
from draft_service.gpu.block_graphs import BlockGraphs
from draft_service.gpu.device_trees import TreeKernels
from draft_service.model.draft_model import DraftModel
from draft_service.model.rope import rope_tables
from draftwood.sampling import SamplingParams
from draftwood.tree import DraftTree
from draftwood.tree_options import TreeOptions


class RefusalReason(Enum):
    """Why a sequence got no tree."""

    CACHE_FULL = auto()
    CONTEXT_INCOMPLETE = auto()
    UNSUPPORTED = auto()
    DEADLINE = auto()
    INVALID = auto()


SLOTS_A_ROW = 2  # a sequence may be prefilled while the one whose place it takes is still open


@dataclass(frozen=True, slots=True)
class Refusal:
    """No tree, and why. `context_length`: rows that the cache holds, for CONTEXT_INCOMPLETE."""

    reason: RefusalReason
    message: str
    context_length: int = 0


@dataclass(frozen=True, slots=True)
class Drafted:
    """A tree, and the likeliest tokens of every depth when they were asked for."""

    tree: DraftTree
    candidates: Candidates | None = None


@dataclass(frozen=True, slots=True)
class ContextRows:
    """Committed tokens' feature rows."""

    start: int
    features: Tensor  # [n, hidden_size]


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """What one message brings and wants for one sequence."""

    sequence_id: int
    epoch: int
    base_length: int
    root: int
    context: ContextRows | None = None
    tree: TreeOptions | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(slots=True)
class StepOutcome:
    """One entry a step, None where only context came; times in seconds."""

    results: list[Drafted | Refusal | None]
    draft_s: float = 0.0
    tree_s: float = 0.0


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
        kernels: TreeKernels | None = None,  # that make trees on the device, over static buffers only
    ) -> None:
        self.model, self.config, self.max_batch = model, model.config, max_batch
        self.cache = ContextCache(
            self.config,
            num_slots=SLOTS_A_ROW * max_batch,
            max_context=max_context,
            dtype=model.dtype,
            device=model.device,
        )
        self._closed = ClosedSequences()
        self._rotation = rope_tables(self.config, max_context + self.config.block_size, model.dtype, model.device)
        self._blocks = BlockAssembler(self.config, self.cache, self._rotation, max_batch)
        self._ranker = CandidateRanker(self.config.vocab_size, self.config.max_depth, model.device)
        self._masks = torch.full((max_batch, self.config.block_size), self.config.mask_token_id)
        self._pass = BlockPass(model, compile_steps=compile)
        self._contexts = ContextProjection(model, compile_steps=compile)
        self._graphs: BlockGraphs | None = None
        if model.device.type == "cuda" if graphs is None else graphs:
            self._graphs = BlockGraphs(model, self.cache, self._rotation, compile_steps=compile, kernels=kernels)

    @torch.inference_mode()
    def step(
        self, stream_id: int, steps: Sequence[SequenceStep], closed: Iterable[int], is_late: Callable[[], bool]
    ) -> StepOutcome:
        """Serves one message. Where `is_late` says so once the rows are in, nothing is drafted."""
        for sequence_id in closed:
            self._close(SequenceKey(stream_id, sequence_id))
        outcome = StepOutcome([None] * len(steps))
        keys = [SequenceKey(stream_id, s.sequence_id) for s in steps]
        for key in keys:
            self._closed.discard(key)
        taken = self._take([(key, s.epoch, s.context) for key, s in zip(keys, steps, strict=True)])
        ready: list[tuple[int, SequenceStep, CachedSequence]] = []
        for i, (step, sequence) in enumerate(zip(steps, taken, strict=True)):
            if step.tree is None:
                continue
            if isinstance(sequence, CachedSequence):
                sequence = self._check(step, sequence)
            if isinstance(sequence, CachedSequence):
                ready.append((i, step, sequence))
            else:
                outcome.results[i] = sequence
        for at in range(0, len(ready), self.max_batch):
            self._draft(ready[at : at + self.max_batch], outcome, is_late)
        return outcome

    @torch.inference_mode()
    def take(self, stream_id: int, sequence_id: int, epoch: int, context: ContextRows) -> Refusal | None:
        """Takes rows ahead of a sequence's first step; None where they are cached now, or the sequence has ended."""
        key = SequenceKey(stream_id, sequence_id)
        if self._closed.is_over(key, epoch):  # calls have no order: the close overtook these rows
            return None
        sequence = self._take([(key, epoch, context)])[0]
        return sequence if isinstance(sequence, Refusal) else None

    def close_stream(self, stream_id: int) -> None:
        """Frees all sequences of a stream."""
        self.cache.close_stream(stream_id)
        self._closed.forget_stream(stream_id)

    def _close(self, key: SequenceKey) -> None:
        sequence = self.cache.find(key)
        if sequence is None:
            self._closed.add(key)
        else:
            self._closed.add(key, sequence.epoch)
            self.cache.close(key)

    def _take(self, arrivals: Sequence[tuple[SequenceKey, int, ContextRows | None]]) -> list[CachedSequence | Refusal]:
        """Opens sequences and caches their new rows, all rows of the message in one product."""
        sequences: list[CachedSequence | Refusal] = []
        fresh: list[tuple[CachedSequence, Tensor]] = []
        for key, epoch, context in arrivals:
            sequence = self._open(key, epoch)
            if isinstance(sequence, CachedSequence) and context is not None:
                rows = self._new_rows(sequence, context)
                if isinstance(rows, Refusal):
                    sequence = rows
                elif rows.shape[0]:
                    fresh.append((sequence, rows))
            sequences.append(sequence)
        if fresh and not (self._graphs is not None and self._graphs.contexts.take(fresh)):
            rows = torch.cat([rows for _, rows in fresh]).to(self.model.device, self.model.dtype)
            stretches = [(s.length, s.length + r.shape[0]) for s, r in fresh]
            cos, sin = (torch.cat([table[a:b] for a, b in stretches]) for table in self._rotation)
            keys, values = self._contexts(rows, cos, sin)
            counts = [r.shape[0] for _, r in fresh]
            for (sequence, _), k, v in zip(fresh, keys.split(counts), values.split(counts), strict=True):
                self.cache.append(sequence, k, v)
        return sequences

    def _open(self, key: SequenceKey, epoch: int) -> CachedSequence | Refusal:
        sequence = self.cache.open(key, epoch)
        if sequence is None:
            return Refusal(RefusalReason.CACHE_FULL, "every context slot is taken")
        if epoch < sequence.epoch:
            return Refusal(
                RefusalReason.INVALID, f"epoch is {epoch}, but the sequence is already at epoch {sequence.epoch}"
            )
        return sequence

    def _new_rows(self, sequence: CachedSequence, context: ContextRows) -> Tensor | Refusal:
        """The rows that are not cached yet."""
        end = context.start + context.features.shape[0]
        if end > self.cache.max_context:
            return Refusal(RefusalReason.CACHE_FULL, f"rows up to position {end} do not fit {self.cache.max_context}")
        if sequence.length == 0 and self.cache.window:  # such layers look at the end of the context only
            sequence.first = sequence.length = context.start
        if context.start > sequence.length:
            return Refusal(
                RefusalReason.CONTEXT_INCOMPLETE,
                f"rows start at position {context.start}, but the cache holds {sequence.length}",
                sequence.length,
            )
        return context.features[sequence.length - context.start :]

    def _check(self, step: SequenceStep, sequence: CachedSequence) -> CachedSequence | Refusal:
        if sequence.length > step.base_length:
            message = f"base_length is {step.base_length}, but {sequence.length} rows are committed already"
            return Refusal(RefusalReason.INVALID, message)
        if self.cache.has_context(sequence, step.base_length):
            return sequence
        if sequence.length == step.base_length:  # the window's older part is missing: it must come again from the front
            sequence.first = sequence.length = 0
        message = f"base_length is {step.base_length}, but the cache holds {sequence.length} rows"
        return Refusal(RefusalReason.CONTEXT_INCOMPLETE, message, sequence.length)

    def _draft(
        self,
        batch: Sequence[tuple[int, SequenceStep, CachedSequence]],
        outcome: StepOutcome,
        is_late: Callable[[], bool],
    ) -> None:
        """One pass over the batch, then its trees."""
        if is_late():
            for i, _, _ in batch:
                outcome.results[i] = Refusal(
                    RefusalReason.DEADLINE, "the deadline passed before the draft pass could start"
                )
            return
        begin = time.perf_counter()
        if self._draft_on_device(batch, outcome):
            outcome.draft_s += time.perf_counter() - begin
            return
        depths = [self._depths(step) for _, step, _ in batch]
        logits = self._logits([step.root for _, step, _ in batch], [s for _, _, s in batch], depths)
        middle = time.perf_counter()
        for (i, step, _), rows in zip(batch, logits, strict=True):
            outcome.results[i] = self._tree(step, rows)
        outcome.draft_s += middle - begin
        outcome.tree_s += time.perf_counter() - middle

    def _draft_on_device(self, batch: Sequence[tuple[int, SequenceStep, CachedSequence]], outcome: StepOutcome) -> bool:
        """Pass and trees without a look at the logits in between; False where a tree needs that."""
        wanted = [(s.root, s.base_length, s.tree, s.sampling) for _, s, _ in batch if s.tree is not None]
        graphs = self._graphs
        if graphs is None or not all(graphs.can_make(options, sampling) for _, _, options, sampling in wanted):
            return False
        trees = graphs.trees([sequence for _, _, sequence in batch], wanted)
        for (i, _, _), tree in zip(batch, trees, strict=True):
            outcome.results[i] = Drafted(tree)
        return True

    def _depths(self, step: SequenceStep) -> int:
        """Depths worth a product with the head: no tree is deeper than its budget."""
        assert step.tree is not None
        deepest = self.config.max_depth
        return deepest if step.tree.num_candidates else min(step.tree.tree_budget, deepest)

    def _logits(
        self, roots: Sequence[int], sequences: Sequence[CachedSequence], depths: Sequence[int]
    ) -> Sequence[Tensor]:  # float32 [depths, V] each
        if self._graphs is not None:
            logits = self._graphs.logits(roots, sequences)
            return [logits[i, :n].float() for i, n in enumerate(depths)]
        inputs = self._blocks.assemble(sequences)
        block = self._masks[: len(roots)].clone()
        block[:, 0] = torch.tensor(roots)
        x = self.model.embed(block.to(self.model.device))
        hidden = self._pass(x, inputs)
        first = 0 if self.config.sample_from_anchor else 1
        rows = torch.cat([hidden[i, first : first + n] for i, n in enumerate(depths)])
        return self.model.logits(rows).split(list(depths))

    def _tree(self, step: SequenceStep, logits: Tensor) -> Drafted:
        options = step.tree
        assert options is not None
        ranking = self._ranker.rank(logits[: options.tree_budget], options.width, step.sampling, step.base_length)
        candidates = likeliest(logits, options.num_candidates) if options.num_candidates else None
        return Drafted(build_tree(step.root, ranking, options), candidates)

"""The engine's view of the drafter: which sequences to draft for, what each must still be told, what came back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from draftwood.tree import MAX_TREE_BUDGET, DraftTree
from draftwood.tree_options import TreeOptions
from verify_service.cache.pools import Pools
from verify_service.core.request import Request
from verify_service.core.sequence import SequenceState
from verify_service.draft.client import DraftClient
from verify_service.draft.stream import DraftStream
from verify_service.draft.types import ContextRows, DraftAnswer, DraftJob, Fallback, Refusal, RefusalReason

log = logging.getLogger(__name__)

MAX_INLINE_BYTES = 512 << 10  # larger contexts go ahead on a Prefill call
MAX_CHUNK_BYTES = 768 << 10

Cause = Fallback | RefusalReason  # why a sequence gets no tree


@dataclass(frozen=True, slots=True)
class Drafts:
    """Trees by sequence id; sequences without one are verified with a lone root."""

    trees: dict[int, DraftTree]
    busy: float = 0.0  # seconds in the drafter by its own clock
    transport: float = 0.0  # from the sending of the step to its answer, less the drafter's own time


NO_DRAFTS = Drafts({})


class DraftCoordinator:
    """Used by the engine's thread only."""

    def __init__(self, client: DraftClient | None, pools: Pools, *, timeout_s: float) -> None:
        self.client, self.pools, self.timeout_s = client, pools, timeout_s
        # Since the start, by cause: steps of sequences that had to do without a draft.
        self.fallbacks: dict[Cause, int] = dict.fromkeys((*Fallback, *RefusalReason), 0)

    @property
    def refused_trees(self) -> dict[RefusalReason, int]:
        """Since the start, by reason; the stream counts what is stale."""
        return {reason: self.fallbacks[reason] for reason in RefusalReason if reason is not RefusalReason.STALE}

    @property
    def stream(self) -> DraftStream | None:
        """The open stream, if there is one."""
        stream = self.client.stream if self.client is not None else None
        return stream if stream is not None and not stream.is_broken else None

    def close(self, sequence: SequenceState) -> None:
        """Frees what the drafter holds for an ended sequence, with the next message."""
        stream = self.stream
        if stream is not None and sequence.stream_id == stream.stream_id:
            stream.close_sequence(sequence.sequence_id)

    def flush(self) -> None:
        """Behind everything that a turn of the engine does."""
        if (stream := self.stream) is not None:
            stream.flush()

    def draft(self, sequences: Sequence[SequenceState], traceparent: str = "") -> Drafts:
        """One exchange for the batch; whatever fails leaves sequences without a tree. The drafter's span belongs to
        `traceparent`."""
        wanting, stream = [s for s in sequences if s.wants_draft], self.stream
        if stream is None or stream.is_busy:
            self.fallbacks[Fallback.ABSENT if stream is None else Fallback.BUSY] += len(wanting)
            return NO_DRAFTS
        jobs: list[DraftJob] = []
        asked: list[SequenceState] = []
        for sequence in wanting:
            job = self._job(sequence, stream)
            if isinstance(job, DraftJob):
                jobs.append(job)
                asked.append(sequence)
            else:
                self.fallbacks[job] += 1
        if not jobs:
            return NO_DRAFTS
        answer = stream.exchange(jobs, self.timeout_s, traceparent)
        if not isinstance(answer, DraftAnswer):
            self.fallbacks[answer] += len(asked)
            if answer is Fallback.TIMEOUT:
                log.warning("the drafter did not answer within %.0f ms", self.timeout_s * 1e3)
            return NO_DRAFTS
        trees: dict[int, DraftTree] = {}
        for sequence in asked:
            outcome = answer.outcomes[sequence.sequence_id]
            if isinstance(outcome, Refusal):
                self.fallbacks[self._refused(sequence, outcome)] += 1
                continue
            trees[sequence.sequence_id] = outcome
            sequence.rows_sent = sequence.base_length
            if outcome.num_nodes == 1:
                self.fallbacks[Fallback.EMPTY] += 1
        return Drafts(trees, answer.busy_s, answer.transport_s)

    def _job(self, sequence: SequenceState, stream: DraftStream) -> DraftJob | Cause:
        """What the drafter must be told, or why the sequence cannot be drafted for now."""
        if sequence.stream_id != stream.stream_id:  # a new stream knows nothing of it
            sequence.stream_id, sequence.is_draftable = stream.stream_id, True
            sequence.epoch += 1
            sequence.rows_sent = 0
        if not sequence.is_draftable:
            return Fallback.UNDRAFTABLE
        held_up = stream.prefill_state(sequence.sequence_id)
        if held_up is not None:
            return self._refused(sequence, held_up) if isinstance(held_up, Refusal) else held_up
        window, request = stream.facts.context_window, sequence.request
        start = max(sequence.rows_sent, sequence.base_length - window if window else 0)
        row_bytes = self.pools.features.shape[1] * self.pools.features.element_size()
        if (sequence.base_length - start) * row_bytes > MAX_INLINE_BYTES:
            self._prefill(sequence, stream, start, row_bytes)
            return Fallback.PREFILL
        return DraftJob(
            sequence_id=sequence.sequence_id,
            epoch=sequence.epoch,
            base_length=sequence.base_length,
            root=sequence.root,
            context=self._rows(sequence, start, sequence.base_length) if start < sequence.base_length else None,
            tree=_tree_options(request, stream.facts.max_depth),
            sampling=request.sampling,
        )

    def _prefill(self, sequence: SequenceState, stream: DraftStream, start: int, row_bytes: int) -> None:
        per_chunk = max(MAX_CHUNK_BYTES // row_bytes, 1)
        edges = [*range(start, sequence.base_length, per_chunk), sequence.base_length]
        chunks = [self._rows(sequence, a, b) for a, b in pairwise(edges)]
        stream.prefill(sequence.sequence_id, sequence.epoch, chunks, sequence.request.traceparent)
        sequence.rows_sent = sequence.base_length

    def _rows(self, sequence: SequenceState, start: int, end: int) -> ContextRows:
        features = self.pools.features[torch.from_numpy(sequence.slots[start:end])].cpu()  # [P, F]
        if features.dtype == torch.float16:
            features = features.float()
        return ContextRows(
            start=start,
            features=features.contiguous().view(torch.uint8).numpy().tobytes(),
            is_bfloat16=features.dtype == torch.bfloat16,
        )

    def _refused(self, sequence: SequenceState, refusal: Refusal) -> RefusalReason:
        """Notes what a refusal says about the drafter's context cache; its reason."""
        match refusal.reason:
            case RefusalReason.MALFORMED:
                sequence.rows_sent = sequence.base_length
            case RefusalReason.CONTEXT_INCOMPLETE:
                sequence.rows_sent = refusal.context_length
            case RefusalReason.CACHE_FULL | RefusalReason.UNSUPPORTED | RefusalReason.INVALID:
                log.warning("no more drafts for a sequence: %s", refusal.message)
                sequence.is_draftable = False
            case RefusalReason.DEADLINE | RefusalReason.STALE:
                pass
        return refusal.reason


def _tree_options(request: Request, max_depth: int) -> TreeOptions:
    """A chain is as long as the drafter's depth at most; in shadow-linear mode it comes on top of the tree."""
    budget = request.tree_budget
    if request.algorithm == "dflash":
        budget = min(budget, max_depth)
    elif request.shadow_linear:
        budget = min(budget + max_depth, MAX_TREE_BUDGET)
    return TreeOptions(request.algorithm, budget, request.width_cap, request.spine or request.shadow_linear)

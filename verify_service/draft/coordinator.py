"""The engine's view of the drafter: which sequences to draft for, what each must still be told, what came back."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from draftwood.tree import MAX_TREE_BUDGET, DraftTree
from verify_service.cache.pools import Pools
from verify_service.core.request import Request
from verify_service.core.sequence import SequenceState
from verify_service.draft.client import DraftClient
from verify_service.draft.stream import DraftStream
from verify_service.draft.types import ContextRows, DraftJob, DraftOutcome, Fallback, RefusalReason

log = logging.getLogger(__name__)

MAX_INLINE_BYTES = 512 << 10  # larger contexts go ahead on the Prefill stream
MAX_CHUNK_BYTES = 768 << 10


@dataclass(frozen=True, slots=True)
class Drafts:
    """Trees by sequence id; sequences without one are verified with a lone root."""

    trees: dict[int, DraftTree]
    wait: float  # seconds in all
    busy: float = 0.0  # of it, in the drafter by its own clock
    transport: float = 0.0  # from the sending of the step to its answer, less the drafter's own time


NO_DRAFTS = Drafts({}, 0.0)


class DraftCoordinator:
    """Used by the engine's thread only."""

    def __init__(self, client: DraftClient | None, pools: Pools, *, timeout_s: float) -> None:
        self.client, self.pools, self.timeout_s = client, pools, timeout_s
        self._closed: list[int] = []
        # Since the start, by cause: steps of sequences that had to do without a draft, trees that were refused.
        self.fallbacks: dict[Fallback | RefusalReason, int] = dict.fromkeys((*Fallback, *RefusalReason), 0)
        self.refused_trees: dict[RefusalReason, int] = dict.fromkeys(RefusalReason, 0)

    @property
    def link(self) -> DraftStream | None:
        """The open stream, if there is one."""
        link = self.client.link if self.client is not None else None
        return link if link is not None and not link.is_broken else None

    def close(self, sequence: SequenceState) -> None:
        """Frees what the drafter holds for an ended sequence, with the next message."""
        link = self.link
        if link is not None and sequence.link_id == link.link_id:
            link.end_prefill(sequence.sequence_id)
            self._closed.append(sequence.sequence_id)

    def flush(self) -> None:
        """Sends closed ids where no step will carry them: an engine without work has no other occasion for it."""
        link = self.link
        if link is None:
            self._closed.clear()
        elif self._closed:
            link.send((), self._take_closed(), 0.0)

    def draft(self, sequences: Sequence[SequenceState], traceparent: str = "") -> Drafts:
        """One exchange for the batch; whatever fails leaves sequences without a tree. The drafter's span belongs to
        `traceparent`."""
        wanting = [s for s in sequences if s.wants_draft]
        causes: dict[int, Fallback | RefusalReason] = {}
        drafts = self._exchange(wanting, traceparent, causes)
        for s in wanting:
            tree = drafts.trees.get(s.sequence_id)
            if tree is None or tree.num_nodes == 1:
                self.fallbacks[causes.get(s.sequence_id, Fallback.EMPTY)] += 1
        return drafts

    def _exchange(
        self, wanting: Sequence[SequenceState], traceparent: str, causes: dict[int, Fallback | RefusalReason]
    ) -> Drafts:
        """Writes into `causes` why sequences get no tree."""

        def none_for(cause: Fallback) -> None:
            for s in wanting:
                causes.setdefault(s.sequence_id, cause)

        started, link = time.perf_counter(), self.link
        if link is None or self.client is None or link.is_busy:
            none_for(Fallback.ABSENT if link is None else Fallback.BUSY)
            return NO_DRAFTS
        jobs = [job for s in wanting if (job := self._job(s, link, causes)) is not None]
        if not jobs:
            return NO_DRAFTS
        sent = time.perf_counter()
        link.send(jobs, self._take_closed(), self.timeout_s, traceparent)
        response = link.receive(self.timeout_s)
        received = time.perf_counter()
        if response is None:
            none_for(Fallback.DISCONNECT if link.is_broken else Fallback.TIMEOUT)
            if not link.is_broken:
                log.warning("the drafter did not answer within %.0f ms", self.timeout_s * 1e3)
            return Drafts({}, received - started)
        answer = self.client.read_answer(response, jobs, link.facts.max_depth)
        trees: dict[int, DraftTree] = {}
        by_id = {s.sequence_id: s for s in wanting}
        for job in jobs:
            outcome = answer.outcomes[job.sequence_id]
            if outcome.tree is not None:
                trees[job.sequence_id] = outcome.tree
            elif outcome.refused is not None:
                causes[job.sequence_id] = outcome.refused
            self._note(by_id[job.sequence_id], outcome)
        wait = time.perf_counter() - started
        busy = min(answer.busy, received - sent)  # by the drafter's own word, which cannot be longer than the wait
        return Drafts(trees, wait, busy, received - sent - busy)

    def _take_closed(self) -> list[int]:
        closed, self._closed = self._closed, []
        return closed

    def _job(
        self, sequence: SequenceState, link: DraftStream, causes: dict[int, Fallback | RefusalReason]
    ) -> DraftJob | None:
        """What the drafter must be told; None where the sequence cannot be drafted for now, its cause written down."""
        if sequence.link_id != link.link_id:  # a new stream knows nothing of it
            sequence.link_id, sequence.is_draftable = link.link_id, True
            sequence.epoch += 1
            sequence.rows_sent = 0
        if not sequence.is_draftable or link.is_prefilling(sequence.sequence_id):
            causes[sequence.sequence_id] = Fallback.PREFILL if sequence.is_draftable else Fallback.UNDRAFTABLE
            return None
        if (outcome := link.prefill_refusal(sequence.sequence_id)) is not None:
            causes[sequence.sequence_id] = outcome.refused or Fallback.UNDRAFTABLE
            self._note(sequence, outcome)
            return None
        window = link.facts.context_window
        start = max(sequence.rows_sent, sequence.base_length - window if window else 0)
        request = sequence.request
        row_bytes = self.pools.features.shape[1] * self.pools.features.element_size()
        if (sequence.base_length - start) * row_bytes > MAX_INLINE_BYTES:
            causes[sequence.sequence_id] = Fallback.PREFILL
            self._prefill(sequence, link, start, row_bytes)
            return None
        context = self._rows(sequence, start, sequence.base_length) if start < sequence.base_length else None
        return DraftJob(
            sequence_id=sequence.sequence_id,
            epoch=sequence.epoch,
            base_length=sequence.base_length,
            root=sequence.root,
            context=context,
            algorithm=request.algorithm,
            tree_budget=_budget(request, link.facts.max_depth),
            width_cap=request.width_cap,
            spine=request.spine or request.shadow_linear,
            sampling=request.sampling,
        )

    def _prefill(self, sequence: SequenceState, link: DraftStream, start: int, row_bytes: int) -> None:
        per_chunk = max(MAX_CHUNK_BYTES // row_bytes, 1)
        edges = [*range(start, sequence.base_length, per_chunk), sequence.base_length]
        chunks = [self._rows(sequence, a, b) for a, b in pairwise(edges)]
        link.prefill(sequence.sequence_id, sequence.epoch, chunks, sequence.request.traceparent)
        sequence.rows_sent = sequence.base_length

    def _rows(self, sequence: SequenceState, start: int, end: int) -> ContextRows:
        features = self.pools.features[torch.from_numpy(sequence.slots[start:end])].cpu()
        if features.dtype == torch.float16:
            features = features.float()
        return ContextRows(
            start=start,
            token_ids=tuple(sequence.token_at(i) for i in range(start, end)),
            features=features.contiguous().view(torch.uint8).numpy().tobytes(),
            is_bfloat16=features.dtype == torch.bfloat16,
        )

    def _note(self, sequence: SequenceState, outcome: DraftOutcome) -> None:
        """What an outcome says about the drafter's context cache."""
        if outcome.refused not in (None, RefusalReason.STALE):  # the client counts those
            self.refused_trees[outcome.refused] += 1
        match outcome.refused:
            case None | RefusalReason.MALFORMED:
                sequence.rows_sent = sequence.base_length
            case RefusalReason.CONTEXT_INCOMPLETE:
                sequence.rows_sent = outcome.context_length
            case RefusalReason.CACHE_FULL | RefusalReason.UNSUPPORTED | RefusalReason.INVALID:
                log.warning("no more drafts for a sequence: %s", outcome.message)
                sequence.is_draftable = False
            case RefusalReason.DEADLINE | RefusalReason.STALE:
                pass


def _budget(request: Request, max_depth: int) -> int:
    """Nodes to ask for: a chain is as long as the drafter's depth at most; in shadow-linear mode it comes on top."""
    if request.algorithm == "dflash":
        return min(request.tree_budget, max_depth)
    return min(request.tree_budget + max_depth, MAX_TREE_BUDGET) if request.shadow_linear else request.tree_budget

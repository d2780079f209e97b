"""Who runs: a bounded fair queue, admitted by free batch rows, pages and slots. Pure bookkeeping."""

from __future__ import annotations

from draftwood.errors import OverloadedError
from verify_service.cache.pages import PageAllocator, SlotAllocator
from verify_service.core.sequence import PREFILL_CHUNK, SequenceState
from verify_service.engine.fair_queue import FairQueue

MAX_OVERTAKES = 16


class Scheduler:
    """Holds every sequence from its arrival to its end. A sequence's pages are reserved for its whole length on
    admission, so a running one never has to be taken back.

    Where the next in line needs more pages than are free, smaller ones behind it may go first, so that it blocks
    nobody; after MAX_OVERTAKES of them nobody else does, so that it gets the pages that come free.
    """

    def __init__(
        self,
        pages: PageAllocator,
        slots: SlotAllocator,
        *,
        max_batch: int,
        max_queue: int,
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> None:
        self.pages, self.slots, self.prefill_chunk = pages, slots, prefill_chunk
        self.max_batch, self.max_queue = max_batch, max_queue
        self.waiting = FairQueue()
        self.active: list[SequenceState] = []

    def enqueue(self, sequence: SequenceState, *, retry_after_s: float = 1.0) -> None:
        """Puts a sequence into the queue. Raises OverloadedError with the retry time where it is full."""
        if len(self.waiting) >= self.max_queue + self.max_batch - len(self.active):
            raise OverloadedError(
                f"{len(self.waiting)} requests are waiting, as many as the queue holds; try again in "
                f"{retry_after_s:.0f} s",
                retry_after_s=retry_after_s,
            )
        self.waiting.push(sequence)

    def admit(self) -> list[SequenceState]:
        """Admits from the queue while there is room; returns the new ones, resources attached."""
        admitted: list[SequenceState] = []
        while len(self.active) < self.max_batch and self.slots.can_allocate():
            sequence = self._next()
            if sequence is None:
                break
            self.waiting.serve(sequence)
            sequence.pages = self.pages.allocate(sequence.max_length)
            sequence.slots = self.pages.slots(sequence.pages)
            sequence.state_slot = self.slots.allocate()
            self.active.append(sequence)
            admitted.append(sequence)
        return admitted

    def _next(self) -> SequenceState | None:
        """The first in line that has the pages it needs, unless somebody before it was overtaken often enough."""
        passed: list[SequenceState] = []
        for sequence in self.waiting.in_order():
            if self.pages.can_allocate(sequence.max_length):
                for other in passed:
                    other.num_overtakes += 1
                return sequence
            if sequence.num_overtakes >= MAX_OVERTAKES:
                return None
            passed.append(sequence)
        return None

    def remove(self, sequence: SequenceState) -> None:
        """Takes a sequence out, wherever it is, and frees what it holds."""
        if sequence in self.active:
            self.active.remove(sequence)
            self.pages.free(sequence.pages)
            self.slots.free(sequence.state_slot)
        else:
            self.waiting.remove(sequence)

    def prefilling(self) -> list[SequenceState]:
        """Admitted sequences whose prompt is not committed yet, in order of admission."""
        return [s for s in self.active if not s.is_prefilled]

    def prefill_parts(self, max_tokens: int) -> list[tuple[SequenceState, int]]:
        """The next pass over prompts: whose go on, and with how many tokens. In order of admission, as many as fit into
        `max_tokens` once all are padded to the longest."""
        parts: list[tuple[SequenceState, int]] = []
        longest = 0
        for sequence in self.prefilling():
            length = min(sequence.num_to_prefill, self.prefill_chunk, max_tokens)
            longest = max(longest, length)
            if (len(parts) + 1) * longest > max_tokens:
                break
            parts.append((sequence, length))
        return parts

    def decoding(self) -> list[SequenceState]:
        return [s for s in self.active if s.is_prefilled]

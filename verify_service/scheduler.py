"""Who runs: a bounded queue in order of arrival, admitted by free batch rows, pages and slots. Pure bookkeeping."""

from __future__ import annotations

from collections import deque

from draftwood.errors import OverloadedError
from verify_service.cache.pages import PageAllocator, SlotAllocator
from verify_service.sequence import Sequence


class Scheduler:
    """Holds every sequence from its arrival to its end. A sequence's pages are reserved for its whole length on
    admission, so a running one never has to be taken back."""

    def __init__(self, pages: PageAllocator, slots: SlotAllocator, *, max_batch: int, max_queue: int) -> None:
        self.pages, self.slots = pages, slots
        self.max_batch, self.max_queue = max_batch, max_queue
        self.waiting: deque[Sequence] = deque()
        self.active: list[Sequence] = []

    def enqueue(self, sequence: Sequence) -> None:
        """Puts a sequence at the end of the queue. Raises OverloadedError where it is full."""
        if len(self.waiting) >= self.max_queue + self.max_batch - len(self.active):
            raise OverloadedError(
                f"{len(self.waiting)} requests are waiting, as many as the queue holds", retry_after_s=1.0
            )
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Admits from the head of the queue while there is room; returns the new ones, resources attached."""
        admitted: list[Sequence] = []
        while self.waiting and len(self.active) < self.max_batch:
            sequence = self.waiting[0]
            tokens = self.tokens_of(sequence)
            if not (self.pages.can_allocate(tokens) and self.slots.can_allocate()):
                break
            self.waiting.popleft()
            sequence.pages = self.pages.allocate(tokens)
            sequence.slots = self.pages.slots(sequence.pages)
            sequence.state_slot = self.slots.allocate()
            self.active.append(sequence)
            admitted.append(sequence)
        return admitted

    def tokens_of(self, sequence: Sequence) -> int:
        """Token slots that a sequence needs in all."""
        return len(sequence.request.prompt) + sequence.request.max_new_tokens

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is, and frees what it holds."""
        if sequence in self.active:
            self.active.remove(sequence)
            self.pages.free(sequence.pages)
            self.slots.free(sequence.state_slot)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def prefilling(self) -> list[Sequence]:
        """Admitted sequences whose prompt is not committed yet, in order of arrival."""
        return [s for s in self.active if not s.is_prefilled]

    def decoding(self) -> list[Sequence]:
        """Sequences that take part in the next step."""
        return [s for s in self.active if s.is_prefilled]

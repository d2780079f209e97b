"""Which pages belong to whom: a free list of fixed-size pages. Page 0 is scratch and never handed out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SCRATCH_SLOT = 0


class PageAllocator:
    """Hands out pages of `page_size` token slots, the lowest free page first: short loads touch little memory."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages, 0, -1))

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def can_allocate(self, num_tokens: int) -> bool:
        return self.pages_for(num_tokens) <= len(self._free)

    def allocate(self, num_tokens: int) -> list[int]:
        """Pages for `num_tokens`; `can_allocate` must hold."""
        return [self._free.pop() for _ in range(self.pages_for(num_tokens))]

    def free(self, pages: list[int]) -> None:
        self._free.extend(pages)
        self._free.sort(reverse=True)

    def slots(self, pages: list[int]) -> NDArray[np.int64]:
        """Pool rows of the pages, by position: int64 [len(pages) * page_size]."""
        return (np.array(pages, np.int64)[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)


class SlotAllocator:
    """Recurrent-state slots, one per sequence. Slot 0 is scratch."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots, 0, -1))

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def can_allocate(self) -> bool:
        return bool(self._free)

    def allocate(self) -> int:
        return self._free.pop()

    def free(self, slot: int) -> None:
        self._free.append(slot)

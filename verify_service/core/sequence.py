"""One request being decoded: its tokens, where its committed state lies, and what the drafter knows of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import DraftwoodError
from draftwood.sampling import TokenCounts
from verify_service.core.events import Event, TokenLogProbs
from verify_service.core.request import Request
from verify_service.core.stats import Stats

PREFILL_CHUNK = 64  # tokens of one prompt in one pass at most, unless the runner takes more


@dataclass(slots=True, eq=False)
class SequenceState:
    """Owned by the engine's thread. `base_length` moves on once a commit has made the tokens permanent."""

    sequence_id: int
    request: Request
    emit: Callable[[Event], None]
    arrived_at: float
    deadline: float | None = None  # on the clock of `arrived_at`
    stats: Stats = field(default_factory=Stats)

    num_overtakes: int = 0  # later ones that were admitted because this one's pages were not free

    # Set on admission.
    pages: list[int] = field(default_factory=list[int])
    slots: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))  # pool rows by position
    state_slot: int = 0
    admitted_at: float = 0.0

    # Set by prefill and commits.
    base_length: int = 0  # committed tokens; the position of the root
    answer: list[int] = field(default_factory=list[int])  # generated tokens, the root the last of them
    prompt_log_probs: list[TokenLogProbs] = field(default_factory=list[TokenLogProbs])
    first_token_at: float = 0.0
    error: DraftwoodError | None = None  # what prefill met; the request ends with it

    # What the drafter holds.
    stream_id: int = 0  # of the stream that it was opened on last
    epoch: int = 0
    rows_sent: int = 0
    is_draftable: bool = True

    @property
    def root(self) -> int:
        """The last bonus token."""
        return self.answer[-1]

    @property
    def is_prefilled(self) -> bool:
        return self.num_to_prefill <= 0

    @property
    def max_length(self) -> int:
        """Tokens of the prompt and of the longest answer; what its pages are for."""
        return len(self.request.prompt_token_ids) + self.request.max_new_tokens

    @property
    def num_to_prefill(self) -> int:
        return len(self.request.prompt_token_ids) - self.base_length

    @property
    def num_remaining(self) -> int:
        return self.request.max_new_tokens - len(self.answer)

    @property
    def wants_draft(self) -> bool:
        """Whether the next step should have a draft: one that can still be accepted."""
        return self.request.algorithm != "none" and self.num_remaining > 1

    def counts(self, path_tokens: list[int]) -> TokenCounts:
        """What penalties count at a node whose path, root left out, carries `path_tokens`."""
        return TokenCounts(frozenset(self.request.prompt_token_ids), Counter([*self.answer, *path_tokens]))

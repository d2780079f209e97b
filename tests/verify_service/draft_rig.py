"""A draft client connected to a scripted drafter on a real port, and sequences to draft for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from draftwood.v1 import draft_pb2
from tests.verify_service.fake_drafter import Answer, FakeDrafter
from verify_service.cache.pools import Pools
from verify_service.core.request import Request
from verify_service.core.sequence import SequenceState
from verify_service.draft.client import DraftClient, Expected
from verify_service.draft.coordinator import DraftCoordinator, Drafts

EXPECTED = Expected(
    target_layer_ids=(1, 4), hidden_size=6, vocab_size=100, tokenizer_hash="aa", projection_checksum="bb"
)
PATIENCE_S = 20.0


class Rig:
    """A fake drafter, a client connected to it, and sequences over random feature rows."""

    def __init__(self, fake: FakeDrafter, timeout_s: float = PATIENCE_S, num_rows: int = 64) -> None:
        self.fake = fake
        self.client = DraftClient(f"127.0.0.1:{fake.port}", EXPECTED)
        rows = torch.randn(num_rows, 6, generator=torch.Generator().manual_seed(0))
        none = torch.zeros(0)
        self.pools = Pools(keys=none, values=none, features=rows, states=none, windows=none)
        self.coordinator = DraftCoordinator(self.client, self.pools, timeout_s=timeout_s)
        self.client.start()
        assert self.client.settled.wait(PATIENCE_S)

    def sequence(self, sequence_id: int = 1, base_length: int = 5, **settings: Any) -> SequenceState:
        """A sequence in the middle of its answer, its rows in odd places of the pool."""
        values: dict[str, Any] = {"algorithm": "ddtree", "tree_budget": 7, "width_cap": 4, "max_new_tokens": 50}
        request = Request(request_id="r", prompt_token_ids=tuple(range(20, 20 + base_length)), **(values | settings))
        sequence = SequenceState(sequence_id, request, lambda _: None, 0.0)
        num_rows = self.pools.features.shape[0]
        sequence.slots = np.arange(num_rows, dtype=np.int64)[::-1].copy()
        sequence.base_length, sequence.answer = base_length, [42]
        return sequence

    def commit(self, sequence: SequenceState, *tokens: int) -> None:
        """Commits the root and all tokens but the last, the new root."""
        sequence.answer += tokens
        sequence.base_length += len(tokens)

    def request(self) -> draft_pb2.DraftRequest:
        """The next message that the drafter got."""
        return self.fake.requests.get(timeout=PATIENCE_S)

    def check_context(self, sequence: SequenceState) -> None:
        """The drafter holds the feature rows of the sequence's committed tokens."""
        rows = self.pools.features[torch.from_numpy(sequence.slots[: sequence.base_length])]
        assert self.fake.cache.features(sequence.sequence_id) == rows.numpy().tobytes()


class MakeRig(Protocol):
    """Starts a fake drafter that answers as told, and a client of it; both end with the test."""

    def __call__(
        self,
        answer: Answer | None = None,
        *,
        model: dict[str, Any] | None = None,
        timeout_s: float = PATIENCE_S,
        num_rows: int = 64,
    ) -> Rig: ...


def until(condition: Callable[[], bool]) -> None:
    """Waits for what another thread does, and no longer than it takes."""
    waited = threading.Event()
    for _ in range(int(PATIENCE_S / 0.005)):
        if condition():
            return
        waited.wait(0.005)
    raise AssertionError("it did not come")


def draft_until(rig: Rig, sequences: list[SequenceState], done: Callable[[Drafts], bool]) -> Drafts:
    """Steps until an outcome that another thread has a part in."""
    drafts: list[Drafts] = []
    until(lambda: done(drafts.append(rig.coordinator.draft(sequences)) or drafts[-1]))
    return drafts[-1]

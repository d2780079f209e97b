"""A draft service that does as it is told, on a real port; it holds a context cache as the contract describes it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, Self

import grpc
import numpy as np
import torch

from draftwood.noise import NOISE_VERSION
from draftwood.rpc.conventions import SERVER_OPTIONS
from draftwood.rpc.wire import PROTOCOL_VERSION, tree_to_wire
from draftwood.tree import DraftTree
from draftwood.v1 import draft_pb2, draft_pb2_grpc, tree_pb2
from verify_service.cache.pools import Pools
from verify_service.core.request import Request
from verify_service.core.sequence import SequenceState
from verify_service.draft.client import DraftClient, Expected
from verify_service.draft.coordinator import DraftCoordinator, Drafts

Answer = Callable[[draft_pb2.DraftSequence], draft_pb2.DraftResult | None]

MODEL: dict[str, Any] = {
    "model_id": "fake",
    "block_size": 8,
    "max_depth": 7,
    "target_layer_ids": [1, 4],
    "mask_token_id": 3,
    "hidden_size": 6,
    "vocab_size": 100,
    "tokenizer_hash": "aa",
    "projection_checksum": "bb",
    "context_window": 0,
    "max_context": 4096,
    "protocol_version": PROTOCOL_VERSION,
    "noise_version": NOISE_VERSION,
}


def result(sequence: draft_pb2.DraftSequence, **changes: Any) -> draft_pb2.DraftResult:
    """A result for the sequence, its echo right unless changed."""
    values: dict[str, Any] = {
        "sequence_id": sequence.sequence_id,
        "epoch": sequence.epoch,
        "base_length": sequence.base_length,
        "root_token_id": sequence.root_token_id,
    }
    return draft_pb2.DraftResult(**(values | changes))


def chain(*token_ids: int) -> tree_pb2.DraftTree:
    """A chain as it travels."""
    return tree_to_wire(DraftTree.chain(0, token_ids))


def two_tokens(sequence: draft_pb2.DraftSequence) -> draft_pb2.DraftResult:
    """The same chain for everybody."""
    return result(sequence, tree=chain(11, 12))


def refusal(sequence: draft_pb2.DraftSequence, reason: Any, **details: Any) -> draft_pb2.DraftResult:
    """No tree, and why."""
    return result(sequence, refusal=draft_pb2.Refusal(reason=reason, message="because", **details))


def num_rows(context: draft_pb2.ContextRows, hidden_size: int = 6) -> int:
    """Rows that a message brings."""
    size = hidden_size * (4 if context.format == draft_pb2.FEATURE_FORMAT_FLOAT32 else 2)
    assert len(context.features) % size == 0
    return len(context.features) // size


class Cache:
    """Rows by position of each sequence, contiguous from 0 on."""

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size = hidden_size
        self.rows: dict[int, tuple[int, list[bytes]]] = {}  # id → epoch, feature rows
        self.lock = threading.Lock()

    def take(self, sequence_id: int, epoch: int, context: draft_pb2.ContextRows) -> int:
        """Appends what continues the cache; returns its length."""
        with self.lock:
            held, rows = self.rows.get(sequence_id, (0, list[bytes]()))
            if held != epoch:
                rows = list[bytes]()
            size = self.hidden_size * (4 if context.format == draft_pb2.FEATURE_FORMAT_FLOAT32 else 2)
            for i in range(num_rows(context, self.hidden_size)):
                if context.start + i == len(rows):
                    rows.append(context.features[i * size : (i + 1) * size])
            self.rows[sequence_id] = epoch, rows
            return len(rows)

    def features(self, sequence_id: int) -> bytes:
        """Feature rows held."""
        return b"".join(self.rows[sequence_id][1])


class FakeDrafter(draft_pb2_grpc.DraftServiceServicer):
    """Records what it is asked and answers with `answer`, a function of one sequence; None leaves it out.

    A sequence whose context is incomplete is refused as the contract says, before `answer` is asked.
    """

    def __init__(self, answer: Answer | None = None, **model: Any) -> None:
        self.answer: Answer = answer or two_tokens
        self.model = draft_pb2.DraftModel(**(MODEL | model))
        self.cache = Cache(self.model.hidden_size)
        self.requests: queue.SimpleQueue[draft_pb2.DraftRequest] = queue.SimpleQueue()
        self.prefilled: queue.SimpleQueue[list[draft_pb2.PrefillRequest]] = queue.SimpleQueue()
        self.closed: list[int] = []
        self.gate = threading.Event()  # answers wait for it
        self.gate.set()
        self.prefill_gate = threading.Event()
        self.prefill_gate.set()
        self.prefill_calls: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()  # each set when its call has ended
        self.prefill_error: grpc.StatusCode | None = None
        self.dies = False
        self.busy_us = 7
        self.skip = 0  # added to the step ids of answers
        self.ended = threading.Event()
        self.handshakes = threading.Semaphore(0)
        self.port = 0
        self._server: grpc.Server | None = None

    def start(self, port: int = 0) -> Self:
        """Listens on `port`, or on a free one."""
        self._server = grpc.server(ThreadPoolExecutor(8), options=SERVER_OPTIONS)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()
        return self

    def kill(self) -> None:
        """Drops every connection at once."""
        if self._server is not None:
            stopped = self._server.stop(0)
            self.gate.set()
            self.prefill_gate.set()
            stopped.wait(10)
            self._server = None

    def GetDraftModel(
        self, request: draft_pb2.GetDraftModelRequest, context: grpc.ServicerContext
    ) -> draft_pb2.GetDraftModelResponse:
        self.handshakes.release()
        return draft_pb2.GetDraftModelResponse(model=self.model, incarnation=1)

    def Draft(
        self, request_iterator: Iterator[draft_pb2.DraftRequest], context: grpc.ServicerContext
    ) -> Iterator[draft_pb2.DraftResponse]:
        try:
            for request in request_iterator:
                self.closed += request.closed_sequence_ids
                response = draft_pb2.DraftResponse(step_id=request.step_id + self.skip, busy_us=self.busy_us)
                for sequence in request.sequences:
                    response.results.extend(r for r in [self._result(sequence)] if r is not None)
                self.requests.put(request)
                self.gate.wait(30)
                if self.dies:
                    context.abort(grpc.StatusCode.UNAVAILABLE, "dying")
                yield response
        finally:
            self.ended.set()

    def _result(self, sequence: draft_pb2.DraftSequence) -> draft_pb2.DraftResult | None:
        held = self.cache.take(sequence.sequence_id, sequence.epoch, sequence.context)
        if held != sequence.base_length and not self.model.context_window:
            reason = draft_pb2.REFUSAL_REASON_CONTEXT_INCOMPLETE
            return refusal(sequence, reason, context_length=held)
        return self.answer(sequence)

    def Prefill(
        self, request_iterator: Iterator[draft_pb2.PrefillRequest], context: grpc.ServicerContext
    ) -> draft_pb2.PrefillResponse:
        ended = threading.Event()
        if not context.add_callback(ended.set):
            ended.set()
        self.prefill_calls.put(ended)
        self.prefill_gate.wait(30)
        chunks = list(request_iterator)
        if self.prefill_error is not None:
            self.prefilled.put([])
            context.abort(self.prefill_error, "lost")
        for chunk in chunks:
            self.cache.take(chunk.sequence_id, chunk.epoch, chunk.context)
        self.prefilled.put(chunks)
        return draft_pb2.PrefillResponse(
            num_rows=sum(num_rows(chunk.context, self.cache.hidden_size) for chunk in chunks)
        )


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

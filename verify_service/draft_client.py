"""The verify side of the draft protocol: finds a drafter, checks that it matches, keeps one stream to it.

A supervising thread connects, shakes hands and reads answers; the engine's thread only puts a step in and waits for its
answer with a deadline. The drafter is optional: whatever goes wrong here ends in steps without drafts.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grpc

from draftwood.errors import MalformedTreeError, ModelMismatchError
from draftwood.rpc import CLIENT_OPTIONS
from draftwood.tree import DraftTree
from draftwood.v1 import draft_pb2, draft_pb2_grpc, tree_pb2
from draftwood.wire import ALGORITHM_TO_WIRE, int32_to_bytes, sampling_to_wire, tree_from_wire
from verify_service.drafting import ContextRows, DraftAnswer, DraftJob, DraftOutcome, Refused

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
MIN_BACKOFF_S, MAX_BACKOFF_S, MISMATCH_BACKOFF_S = 0.1, 2.0, 5.0

_REFUSALS = {
    draft_pb2.REFUSAL_REASON_CACHE_FULL: Refused.CACHE_FULL,
    draft_pb2.REFUSAL_REASON_CONTEXT_INCOMPLETE: Refused.CONTEXT_INCOMPLETE,
    draft_pb2.REFUSAL_REASON_UNSUPPORTED: Refused.UNSUPPORTED,
    draft_pb2.REFUSAL_REASON_DEADLINE: Refused.DEADLINE,
    draft_pb2.REFUSAL_REASON_INVALID: Refused.INVALID,
}


@dataclass(frozen=True, slots=True)
class Expected:
    """What a drafter must say in the handshake."""

    target_layer_ids: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    tokenizer_hash: str
    projection_checksum: str


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """What the connected drafter said."""

    model_id: str
    max_depth: int
    context_window: int
    max_context: int


def check_handshake(expected: Expected, model: draft_pb2.DraftModel) -> DrafterFacts:
    """Raises ModelMismatchError with both values where the drafter does not fit."""
    pairs = (
        ("target_layer_ids", list(expected.target_layer_ids), list(model.target_layer_ids)),
        ("hidden_size", expected.hidden_size, model.hidden_size),
        ("vocab_size", expected.vocab_size, model.vocab_size),
        ("projection_checksum", expected.projection_checksum, model.projection_checksum),
    )
    for name, ours, theirs in pairs:
        if ours != theirs:
            raise ModelMismatchError(f"{name} is {theirs} at the drafter {model.model_id}, {ours} here", field=name)
    ours, theirs = expected.tokenizer_hash, model.tokenizer_hash
    if ours and theirs and ours != theirs:
        raise ModelMismatchError(
            f"tokenizer_hash is {theirs} at the drafter {model.model_id}, {ours} here", field="tokenizer_hash"
        )
    return DrafterFacts(model.model_id, model.max_depth, model.context_window, model.max_context)


class DraftLink:
    """One open stream. `link_id` tells links apart: a sequence opened on another one has to be opened anew."""

    def __init__(self, link_id: int, facts: DrafterFacts, stub: draft_pb2_grpc.DraftServiceStub) -> None:
        self.link_id, self.facts, self._stub = link_id, facts, stub
        self.stream_id = random.getrandbits(63) | 1
        self._requests: queue.SimpleQueue[draft_pb2.DraftRequest | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[draft_pb2.DraftResponse | None] = queue.SimpleQueue()
        self._step_id = 0
        self._outstanding: int | None = None
        self._prefills: dict[
            int, grpc.Future[draft_pb2.PrefillResponse]
        ] = {}  # kept: gRPC cancels a call whose future is collected
        self.is_broken = False
        self.call = stub.Draft(self._messages())

    def _messages(self) -> Iterator[draft_pb2.DraftRequest]:
        while (message := self._requests.get()) is not None:
            yield message

    def read(self) -> None:
        """Moves answers to the engine until the stream ends; runs on the supervising thread."""
        try:
            for response in self.call:
                self._answers.put(response)
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else error
            log.info("the draft stream ended: %s", code)
        finally:
            self.close()

    def close(self) -> None:
        """Ends the stream and wakes whoever waits."""
        self.is_broken = True
        self._requests.put(None)
        self._answers.put(None)
        self.call.cancel()

    @property
    def is_busy(self) -> bool:
        """Whether an answer that came too late is still outstanding; takes it off the wire if it has come by now."""
        while self._outstanding is not None:
            try:
                response = self._answers.get_nowait()
            except queue.Empty:
                return True
            if response is None or response.step_id == self._outstanding:
                self._outstanding = None
        return False

    def send(self, jobs: Sequence[DraftJob], closed: Sequence[int], deadline_s: float) -> None:
        """Sends one step."""
        self._step_id += 1
        self._outstanding = self._step_id if jobs else None
        self._requests.put(
            draft_pb2.DraftRequest(
                stream_id=self.stream_id,
                step_id=self._step_id,
                sequences=[_job_to_wire(job) for job in jobs],
                closed_sequence_ids=closed,
                deadline_us=int(deadline_s * 1e6),
            )
        )

    def receive(self, timeout_s: float) -> draft_pb2.DraftResponse | None:
        """The answer to the step sent last, or None where it does not come in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                response = self._answers.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                return None
            if response is None:
                self._outstanding = None
                return None
            if response.step_id == self._outstanding:
                self._outstanding = None
                return response

    def prefill(self, sequence_id: int, epoch: int, chunks: Sequence[ContextRows]) -> None:
        """Sends a prompt's context ahead on a stream of its own, without waiting for it to arrive."""
        messages = iter(
            [
                draft_pb2.PrefillRequest(
                    stream_id=self.stream_id, sequence_id=sequence_id, epoch=epoch, context=_rows_to_wire(rows)
                )
                for rows in chunks
            ]
        )
        self._prefills[sequence_id] = self._stub.Prefill.future(messages, timeout=60.0)

    def is_prefilling(self, sequence_id: int) -> bool:
        """Whether context of the sequence is still on its way."""
        call = self._prefills.get(sequence_id)
        if call is not None and call.done():
            del self._prefills[sequence_id]
            return False
        return call is not None


class DraftClient:
    """Keeps looking for a drafter at one address, with back-off."""

    def __init__(self, address: str, expected: Expected) -> None:
        self.address, self.expected = address, expected
        self.status = "absent"
        self.mismatch: str | None = None
        self.link: DraftLink | None = None
        self.rejected_trees = self.stale_trees = 0
        self._next_link_id = 0
        self._stopping = threading.Event()
        self.settled = threading.Event()  # set once the first attempt has ended, well or not
        self._thread = threading.Thread(target=self._supervise, name="draft-client", daemon=True)

    def start(self) -> None:
        """Starts looking."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the stream; the drafter frees what it holds for us."""
        self._stopping.set()
        if self.link is not None:
            self.link.close()
        self._thread.join(timeout=5.0)

    def _supervise(self) -> None:
        backoff = MIN_BACKOFF_S
        while not self._stopping.is_set():
            with grpc.insecure_channel(self.address, options=CLIENT_OPTIONS) as channel:
                stub = draft_pb2_grpc.DraftServiceStub(channel)
                try:
                    link = self._connect(stub)
                except ModelMismatchError as error:
                    self._say("mismatch: " + error.message)
                    self.mismatch, backoff = error.message, MISMATCH_BACKOFF_S
                except grpc.RpcError:
                    self._say(f"absent: nothing answers at {self.address}")
                    self.mismatch, backoff = None, min(backoff * 2, MAX_BACKOFF_S)
                else:
                    self.mismatch, backoff, self.link = None, MIN_BACKOFF_S, link
                    self._say("ready")
                    self.settled.set()
                    link.read()
                    self.link = None
                    self._say("absent: the draft stream ended")
            self.settled.set()
            self._stopping.wait(backoff)

    def _say(self, status: str) -> None:
        if status != self.status:
            level = logging.INFO if status == "ready" else logging.WARNING
            log.log(level, "drafter at %s: %s", self.address, status)
        self.status = status

    def _connect(self, stub: draft_pb2_grpc.DraftServiceStub) -> DraftLink:
        response = stub.GetDraftModel(
            draft_pb2.GetDraftModelRequest(), timeout=HANDSHAKE_TIMEOUT_S, wait_for_ready=False
        )
        facts = check_handshake(self.expected, response.model)
        self._next_link_id += 1
        return DraftLink(self._next_link_id, facts, stub)

    def read_answer(self, response: draft_pb2.DraftResponse, jobs: Sequence[DraftJob], max_depth: int) -> DraftAnswer:
        """Checks the trees of an answer; what is malformed or stale is counted and left out."""
        wanted = {job.sequence_id: job for job in jobs}
        outcomes: dict[int, DraftOutcome] = {}
        for result in response.results:
            job = wanted.get(result.sequence_id)
            if job is None or (result.epoch, result.base_length) != (job.epoch, job.base_length):
                self.stale_trees += 1
                continue
            outcomes[job.sequence_id] = self._read_result(result, job, max_depth)
        for job in jobs:
            outcomes.setdefault(job.sequence_id, DraftOutcome(None, Refused.STALE))
        return DraftAnswer(outcomes, response.busy_us / 1e6)

    def _read_result(self, result: draft_pb2.DraftResult, job: DraftJob, max_depth: int) -> DraftOutcome:
        if result.WhichOneof("outcome") != "tree":
            refusal = result.refusal
            reason = _REFUSALS.get(refusal.reason, Refused.INVALID)
            return DraftOutcome(None, reason, refusal.message, refusal.context_length)
        try:
            tree: DraftTree = tree_from_wire(
                result.tree,
                job.root,
                vocab_size=self.expected.vocab_size,
                tree_budget=job.tree_budget,
                max_depth=max_depth,
            )
        except MalformedTreeError as error:
            self.rejected_trees += 1
            log.warning("rejected a tree: %s", error.message)
            return DraftOutcome(None, Refused.MALFORMED, error.message)
        return DraftOutcome(tree)


def _rows_to_wire(rows: ContextRows) -> draft_pb2.ContextRows:
    kind = draft_pb2.FEATURE_FORMAT_BFLOAT16 if rows.is_bfloat16 else draft_pb2.FEATURE_FORMAT_FLOAT32
    return draft_pb2.ContextRows(
        start=rows.start, token_ids=int32_to_bytes(list(rows.token_ids)), features=rows.features, format=kind
    )


def _job_to_wire(job: DraftJob) -> draft_pb2.DraftSequence:
    return draft_pb2.DraftSequence(
        sequence_id=job.sequence_id,
        epoch=job.epoch,
        base_length=job.base_length,
        context=_rows_to_wire(job.context) if job.context is not None else None,
        root_token_id=job.root,
        tree=tree_pb2.TreeOptions(
            algorithm=ALGORITHM_TO_WIRE[job.algorithm],
            tree_budget=job.tree_budget,
            width_cap=job.width_cap,
            spine=job.spine,
        ),
        sampling=sampling_to_wire(job.sampling),
    )

"""The verify side of the draft protocol: finds a drafter, checks that it matches, keeps one link to it.

A supervising thread connects, shakes hands and keeps answers coming; the engine's thread only puts a step in and waits
for its answer with a deadline. The drafter is optional: whatever goes wrong here ends in steps without drafts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from draftwood.errors import MalformedTreeError, ModelMismatchError
from draftwood.rpc.conventions import refusal_in_handshake
from draftwood.rpc.wire import tree_from_wire
from draftwood.security.security import OPEN, Security
from draftwood.tree import DraftTree
from draftwood.v1 import draft_pb2, draft_pb2_grpc
from verify_service.draft.stream import DraftStream
from verify_service.draft.types import DraftAnswer, DrafterFacts, DraftJob, DraftOutcome, RefusalReason

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
MIN_BACKOFF_S, MAX_BACKOFF_S, HOPELESS_BACKOFF_S = 0.1, 2.0, 5.0

_REFUSALS = {
    draft_pb2.REFUSAL_REASON_CACHE_FULL: RefusalReason.CACHE_FULL,
    draft_pb2.REFUSAL_REASON_CONTEXT_INCOMPLETE: RefusalReason.CONTEXT_INCOMPLETE,
    draft_pb2.REFUSAL_REASON_UNSUPPORTED: RefusalReason.UNSUPPORTED,
    draft_pb2.REFUSAL_REASON_DEADLINE: RefusalReason.DEADLINE,
    draft_pb2.REFUSAL_REASON_INVALID: RefusalReason.INVALID,
}


@dataclass(frozen=True, slots=True)
class Expected:
    """What a drafter must say in the handshake."""

    target_layer_ids: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    tokenizer_hash: str
    projection_checksum: str


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


class DraftClient:
    """Keeps looking for a drafter at one address, with back-off."""

    def __init__(self, address: str, expected: Expected, security: Security = OPEN) -> None:
        self.address, self.expected, self._security = address, expected, security
        self.status = "absent"
        self.mismatch: str | None = None
        self.link: DraftStream | None = None
        self.rejected_trees = 0
        self._mismatched_trees = self._late_trees = 0  # each of a thread's own: the engine's, the supervising one
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

    @property
    def stale_trees(self) -> int:
        """Results that came after their deadline, or for another state of their sequence than the one asked about."""
        return self._mismatched_trees + self._late_trees

    @property
    def stale_by_cause(self) -> dict[str, float]:
        """The same, apart."""
        return {"late": self._late_trees, "mismatched": self._mismatched_trees}

    def _count_late(self, response: draft_pb2.DraftResponse) -> None:
        self._late_trees += len(response.results)

    def _supervise(self) -> None:
        backoff = MIN_BACKOFF_S
        while not self._stopping.is_set():
            with self._security.sync_channel(self.address) as channel:
                try:
                    link = self._connect(channel)
                except ModelMismatchError as error:
                    self._say("mismatch: " + error.message)
                    self.mismatch, backoff = error.message, HOPELESS_BACKOFF_S
                except grpc.RpcError as error:
                    refusal = _refusal(error)
                    self._say(f"refused: {refusal}" if refusal else f"absent: nothing answers at {self.address}")
                    self.mismatch = None
                    backoff = HOPELESS_BACKOFF_S if refusal else min(backoff * 2, MAX_BACKOFF_S)
                else:
                    self.mismatch, backoff, self.link = None, MIN_BACKOFF_S, link
                    self._say("ready")
                    self.settled.set()
                    if self._stopping.is_set():  # `stop` came before there was a link to close
                        link.close()
                    link.read()
                    self.link = None
                    self._say("absent: the draft stream ended")
            self.settled.set()
            self._stopping.wait(backoff)

    def _say(self, status: str) -> None:
        if status != self.status:
            is_expected = status == "ready" or self._stopping.is_set()
            level = logging.INFO if is_expected else logging.WARNING
            log.log(level, "drafter at %s: %s", self.address, status)
        self.status = status

    def _connect(self, channel: grpc.Channel) -> DraftStream:
        response = draft_pb2_grpc.DraftServiceStub(channel).GetDraftModel(
            draft_pb2.GetDraftModelRequest(), timeout=HANDSHAKE_TIMEOUT_S, wait_for_ready=False
        )
        facts = check_handshake(self.expected, response.model)
        self._next_link_id += 1
        return DraftStream(self._next_link_id, facts, channel, self._count_late)

    def read_answer(self, response: draft_pb2.DraftResponse, jobs: Sequence[DraftJob], max_depth: int) -> DraftAnswer:
        """Checks the trees of an answer; what is malformed or stale is counted and left out."""
        wanted = {job.sequence_id: job for job in jobs}
        outcomes: dict[int, DraftOutcome] = {}
        for result in response.results:
            job = wanted.get(result.sequence_id)
            if job is None or (result.epoch, result.base_length) != (job.epoch, job.base_length):
                self._mismatched_trees += 1
                continue
            outcomes[job.sequence_id] = self._read_result(result, job, max_depth)
        for job in jobs:
            outcomes.setdefault(job.sequence_id, DraftOutcome(None, RefusalReason.STALE))
        return DraftAnswer(outcomes, response.busy_us / 1e6)

    def _read_result(self, result: draft_pb2.DraftResult, job: DraftJob, max_depth: int) -> DraftOutcome:
        if result.WhichOneof("outcome") != "tree":
            refusal = result.refusal
            reason = _REFUSALS.get(refusal.reason, RefusalReason.INVALID)
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
            return DraftOutcome(None, RefusalReason.MALFORMED, error.message)
        return DraftOutcome(tree)


def _refusal(error: grpc.RpcError) -> str | None:
    """Which side refused the other; None where nobody answered."""
    if isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.UNAUTHENTICATED:
        return error.details()
    return refusal_in_handshake(error)

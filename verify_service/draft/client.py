"""The verify side of the draft protocol: finds a drafter, checks that it matches, keeps one stream to it.

A supervising thread connects, shakes hands and keeps answers coming; the engine's thread only puts a step in and waits
for its answer with a deadline. The drafter is optional: whatever goes wrong here ends in steps without drafts.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

import grpc

from draftwood.errors import ModelMismatchError
from draftwood.noise import NOISE_VERSION
from draftwood.rpc.conventions import refusal_in_handshake
from draftwood.rpc.wire import PROTOCOL_VERSION
from draftwood.security.security import OPEN, Security
from draftwood.v1 import draft_pb2, draft_pb2_grpc
from verify_service.draft.stream import DraftStream
from verify_service.draft.types import DrafterFacts, DroppedResults

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
MIN_BACKOFF_S, MAX_BACKOFF_S, HOPELESS_BACKOFF_S = 0.1, 2.0, 5.0


@dataclass(frozen=True, slots=True)
class Expected:
    """What a drafter of this target says, besides the versions that both sides are built with."""

    target_layer_ids: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    tokenizer_hash: str
    projection_checksum: str


class DraftClient:
    """Keeps looking for a drafter at one address, with back-off."""

    def __init__(self, address: str, expected: Expected, security: Security = OPEN) -> None:
        self.address, self.expected, self._security = address, expected, security
        self.status = "absent"
        self.stream: DraftStream | None = None  # the last one, open or just broken; None while there is no drafter
        self.dropped = DroppedResults()  # over all streams
        self._stopping = threading.Event()
        self.settled = threading.Event()  # set once the first attempt has ended, well or not
        self._thread = threading.Thread(target=self._supervise, name="draft-client", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the stream; the drafter frees what it holds for us."""
        self._stopping.set()
        if self.stream is not None:
            self.stream.close()
        self._thread.join(timeout=5.0)

    def _supervise(self) -> None:
        backoff = MIN_BACKOFF_S
        while not self._stopping.is_set():
            with self._security.sync_channel(self.address) as channel:
                try:
                    stream = self._connect(channel)
                except ModelMismatchError as error:
                    self._say("mismatch: " + error.message)
                    backoff = HOPELESS_BACKOFF_S
                except grpc.RpcError as error:
                    refusal = _refusal(error)
                    self._say(f"refused: {refusal}" if refusal else f"absent: nothing answers at {self.address}")
                    backoff = HOPELESS_BACKOFF_S if refusal else min(backoff * 2, MAX_BACKOFF_S)
                else:
                    backoff, self.stream = MIN_BACKOFF_S, stream
                    self._say("ready")
                    self.settled.set()
                    if self._stopping.is_set():  # `stop` came before there was a stream to close
                        stream.close()
                    stream.read()
                    self.stream = None
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
        return DraftStream(channel, check_handshake(self.expected, response.model), self.dropped)


def _refusal(error: grpc.RpcError) -> str | None:
    """Which side refused the other; None where nobody answered."""
    if isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.UNAUTHENTICATED:
        return error.details()
    return refusal_in_handshake(error)


def check_handshake(expected: Expected, model: draft_pb2.DraftModel) -> DrafterFacts:
    """Raises ModelMismatchError with both values where the drafter does not fit, also where it does not say."""
    pairs = [
        ("protocol_version", PROTOCOL_VERSION, model.protocol_version),
        ("noise_version", NOISE_VERSION, model.noise_version),
        ("target_layer_ids", list(expected.target_layer_ids), list(model.target_layer_ids)),
        ("hidden_size", expected.hidden_size, model.hidden_size),
        ("vocab_size", expected.vocab_size, model.vocab_size),
        ("projection_checksum", expected.projection_checksum, model.projection_checksum),
    ]
    if expected.tokenizer_hash and model.tokenizer_hash:  # a directory without a tokenizer has none
        pairs.append(("tokenizer_hash", expected.tokenizer_hash, model.tokenizer_hash))
    for name, ours, theirs in pairs:
        if ours != theirs:
            raise ModelMismatchError(f"{name} is {theirs} at the drafter {model.model_id}, {ours} here", field=name)
    return DrafterFacts(model.model_id, model.vocab_size, model.max_depth, model.context_window)

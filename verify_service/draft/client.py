"""The verify side of the draft protocol: finds a drafter, checks that it matches, keeps one stream to it.

A supervising thread connects, shakes hands and keeps answers coming; the engine's thread only puts a step in and waits
for its answer with a deadline. The drafter is optional: whatever goes wrong here ends in steps without drafts.
"""

from __future__ import annotations

import logging
import threading

import grpc

from draftwood.errors import ModelMismatchError
from draftwood.rpc.conventions import refusal_in_handshake
from draftwood.security.security import OPEN, Security
from draftwood.v1 import draft_pb2, draft_pb2_grpc
from verify_service.draft.handshake import Expected, check_handshake
from verify_service.draft.stream import DraftStream
from verify_service.draft.types import DroppedResults

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
MIN_BACKOFF_S, MAX_BACKOFF_S, HOPELESS_BACKOFF_S = 0.1, 2.0, 5.0


class DraftClient:
    """Keeps looking for a drafter at one address, with back-off."""

    def __init__(self, address: str, expected: Expected, security: Security = OPEN) -> None:
        self.address, self.expected, self._security = address, expected, security
        self.status = "absent"
        self.mismatch: str | None = None
        self.stream: DraftStream | None = None  # the last one, open or just broken; None while there is no drafter
        self.dropped = DroppedResults()  # over all streams
        self._stopping = threading.Event()
        self.settled = threading.Event()  # set once the first attempt has ended, well or not
        self._thread = threading.Thread(target=self._supervise, name="draft-client", daemon=True)

    def start(self) -> None:
        """Starts looking."""
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
                    self.mismatch, backoff = error.message, HOPELESS_BACKOFF_S
                except grpc.RpcError as error:
                    refusal = _refusal(error)
                    self._say(f"refused: {refusal}" if refusal else f"absent: nothing answers at {self.address}")
                    self.mismatch = None
                    backoff = HOPELESS_BACKOFF_S if refusal else min(backoff * 2, MAX_BACKOFF_S)
                else:
                    self.mismatch, backoff, self.stream = None, MIN_BACKOFF_S, stream
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

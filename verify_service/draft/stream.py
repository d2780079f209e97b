"""One open stream to a drafter: steps go out, answers come in, contexts of prompts go ahead on calls beside it."""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Iterator, Sequence

import grpc

from draftwood.v1 import draft_pb2, draft_pb2_grpc
from verify_service.draft.codec import outcomes_from_wire, write_job, write_rows
from verify_service.draft.types import (
    ContextRows,
    DraftAnswer,
    DrafterFacts,
    DraftJob,
    DroppedResults,
    Fallback,
    Refusal,
    RefusalReason,
)

log = logging.getLogger(__name__)

PREFILL_TIMEOUT_S = 60.0
OVERDUE_S = 15.0  # a drafter that is this late with an answer is given up, and another stream is tried

_METHOD = f"/{draft_pb2.DESCRIPTOR.services_by_name['DraftService'].full_name}/Draft"

# Statuses with which a context would be refused again. After any other it got lost on its way.
_FINAL = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: RefusalReason.CACHE_FULL,
    grpc.StatusCode.OUT_OF_RANGE: RefusalReason.CACHE_FULL,
    grpc.StatusCode.INVALID_ARGUMENT: RefusalReason.INVALID,
    grpc.StatusCode.UNIMPLEMENTED: RefusalReason.UNSUPPORTED,
}


class DraftStream:
    """Used by the engine's thread, but for `read`. A sequence that was opened on another stream has to be opened anew,
    which `stream_id` tells. Results that cannot be used are counted in `dropped`."""

    def __init__(self, channel: grpc.Channel, facts: DrafterFacts, dropped: DroppedResults) -> None:
        self.stream_id = random.getrandbits(63) | 1
        self.facts, self._dropped = facts, dropped
        self.is_broken = False
        self._stub = draft_pb2_grpc.DraftServiceStub(channel)
        self._requests: queue.SimpleQueue[draft_pb2.DraftRequest | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[draft_pb2.DraftResponse | None] = queue.SimpleQueue()
        self._num_messages = self._step_id = 0  # `_step_id` numbers the last message that asked for trees
        self._lock = threading.Lock()  # for the two below: an answer is either taken or late
        self._outstanding: int | None = None  # the step whose answer has not come
        self._is_overdue = False  # whether its deadline has passed
        self._sent_at = 0.0
        # Kept, because gRPC cancels a call whose future is collected.
        self._prefills: dict[int, grpc.Future[draft_pb2.PrefillResponse]] = {}
        self._standing: dict[int, draft_pb2.DraftSequence] = {}  # by sequence id
        self._closed: list[int] = []  # sequences whose end the drafter has not been told
        # Answers are handed over where gRPC's thread decodes them. To take them out of the call, as one does with the
        # stub's, would be another thread's wake-up in every step.
        self.call = channel.stream_stream(
            _METHOD, request_serializer=draft_pb2.DraftRequest.SerializeToString, response_deserializer=self._take
        )(self._messages())

    def _messages(self) -> Iterator[draft_pb2.DraftRequest]:
        while (message := self._requests.get()) is not None:
            yield message

    def read(self) -> None:
        """Keeps answers coming until the stream ends; runs on the supervising thread."""
        try:
            for _ in self.call:
                pass
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else error
            log.info("the draft stream ended: %s", code)
        finally:
            self.close()

    def _take(self, data: bytes) -> draft_pb2.DraftResponse:
        """On gRPC's thread: hands the answer that is waited for over, and counts one that comes too late."""
        response = draft_pb2.DraftResponse.FromString(data)
        # Answers come in the order of the messages: one that skips the step awaited, or answers none, is no answer.
        if response.step_id > (self._outstanding or self._num_messages):
            log.warning("step_id is %d in an answer, which no message has: the stream ends", response.step_id)
            self.call.cancel()
            return response
        with self._lock:
            is_awaited = False
            if response.step_id == self._outstanding:
                is_awaited, self._outstanding = not self._is_overdue, None
            if is_awaited:
                self._answers.put(response)
        if not is_awaited:
            self._dropped.late += len(response.results)
        return response

    def close(self) -> None:
        """Ends the stream and wakes whoever waits."""
        self.is_broken = True
        self._requests.put(None)
        self._answers.put(None)
        self.call.cancel()

    @property
    def is_busy(self) -> bool:
        """Whether an answer that came too late is still outstanding; one that takes far too long ends the stream."""
        if self._outstanding is None:
            return False
        if time.monotonic() - self._sent_at > OVERDUE_S and not self.is_broken:
            log.warning("the drafter has not answered for %.0f s: the stream ends", OVERDUE_S)
            self.close()
        return True

    def exchange(self, jobs: Sequence[DraftJob], timeout_s: float, traceparent: str = "") -> DraftAnswer | Fallback:
        """Sends one step, for which the stream must not be busy, and waits for its answer: TIMEOUT where it does not
        come in time, DISCONNECT where the stream breaks."""
        self._sent_at = time.monotonic()
        with self._lock:
            self._step_id = self._outstanding = self._num_messages + 1
            self._is_overdue = False
        self._send(jobs, timeout_s, traceparent)
        response = self._receive(timeout_s)
        waited_s = time.monotonic() - self._sent_at
        if response is None:
            return Fallback.DISCONNECT if self.is_broken else Fallback.TIMEOUT
        busy_s = min(response.busy_us / 1e6, waited_s)  # the drafter's word, which cannot be longer than the wait
        outcomes = outcomes_from_wire(response.results, jobs, self.facts, self._dropped)
        return DraftAnswer(outcomes, busy_s, waited_s - busy_s)

    def close_sequence(self, sequence_id: int) -> None:
        """The drafter may free what it holds, which the next message says; context on its way need not arrive."""
        if (call := self._prefills.pop(sequence_id, None)) is not None:
            call.cancel()
        self._standing.pop(sequence_id, None)
        self._closed.append(sequence_id)

    def flush(self) -> None:
        """Tells of closed sequences where no step will: an engine without work has no other occasion for it."""
        if self._closed:
            self._send((), 0.0)

    def _send(self, jobs: Sequence[DraftJob], deadline_s: float, traceparent: str = "") -> None:
        self._num_messages += 1
        closed, self._closed = self._closed, []
        request = draft_pb2.DraftRequest(
            stream_id=self.stream_id,
            step_id=self._num_messages,
            closed_sequence_ids=closed,
            deadline_us=int(deadline_s * 1e6),
            traceparent=traceparent,
        )
        for job in jobs:
            write_job(job, self._standing, request.sequences.add())
        self._requests.put(request)

    def _receive(self, timeout_s: float) -> draft_pb2.DraftResponse | None:
        """The answer to the step sent last, or None where it does not come in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                response = self._answers.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                with self._lock:
                    if self._answers.empty():  # else it came at the last moment
                        self._is_overdue = True
                        return None
            else:
                if response is None or response.step_id == self._step_id:  # else its step failed before it was taken
                    return response

    def prefill(self, sequence_id: int, epoch: int, chunks: Sequence[ContextRows], traceparent: str = "") -> None:
        """Sends a prompt's context ahead on a call of its own, without waiting for it to arrive."""
        messages: list[draft_pb2.PrefillRequest] = []
        for rows in chunks:
            message = draft_pb2.PrefillRequest(
                stream_id=self.stream_id, sequence_id=sequence_id, epoch=epoch, traceparent=traceparent
            )
            write_rows(rows, message.context)
            messages.append(message)
        self._prefills[sequence_id] = self._stub.Prefill.future(iter(messages), timeout=PREFILL_TIMEOUT_S)

    def prefill_state(self, sequence_id: int) -> Fallback | Refusal | None:
        """PREFILL while context of the sequence is on its way, and once why it was refused for good. None where it
        arrived, or got lost: a step then tells what is missing."""
        if (call := self._prefills.get(sequence_id)) is None:
            return None
        if not call.done():
            return Fallback.PREFILL
        del self._prefills[sequence_id]
        if not isinstance(call, grpc.Call) or (reason := _FINAL.get(call.code())) is None:
            return None
        return Refusal(reason, call.details() or "")

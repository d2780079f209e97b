"""One open stream to a drafter: steps go out, answers come in, contexts of prompts go ahead on calls beside it."""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import grpc

from draftwood.rpc.wire import ALGORITHM_TO_WIRE, int32_to_bytes, sampling_to_wire
from draftwood.v1 import draft_pb2, draft_pb2_grpc, tree_pb2
from verify_service.draft.types import ContextRows, DrafterFacts, DraftJob, DraftOutcome, RefusalReason

log = logging.getLogger(__name__)

PREFILL_TIMEOUT_S = 60.0
OVERDUE_S = 15.0  # a drafter that is this late with an answer is given up, and another link is tried

_METHOD = f"/{draft_pb2.DESCRIPTOR.services_by_name['DraftService'].full_name}/Draft"

# Statuses with which a context would be refused again. After any other it got lost on its way.
_FINAL = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: RefusalReason.CACHE_FULL,
    grpc.StatusCode.OUT_OF_RANGE: RefusalReason.CACHE_FULL,
    grpc.StatusCode.INVALID_ARGUMENT: RefusalReason.INVALID,
    grpc.StatusCode.UNIMPLEMENTED: RefusalReason.UNSUPPORTED,
}


class DraftStream:
    """Used by the engine's thread, but for `read`. `link_id` tells links apart: a sequence opened on another one has to
    be opened anew. `on_late` is called with each answer that nobody waits for any more, on gRPC's thread."""

    def __init__(
        self,
        link_id: int,
        facts: DrafterFacts,
        channel: grpc.Channel,
        on_late: Callable[[draft_pb2.DraftResponse], None],
    ) -> None:
        self.link_id, self.facts, self._on_late = link_id, facts, on_late
        self._stub = draft_pb2_grpc.DraftServiceStub(channel)
        self.stream_id = random.getrandbits(63) | 1
        self._requests: queue.SimpleQueue[draft_pb2.DraftRequest | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[draft_pb2.DraftResponse | None] = queue.SimpleQueue()
        self._num_messages = self._step_id = 0  # `_step_id` numbers the last message that asked for trees
        self._lock = threading.Lock()  # for the two below: an answer is either taken or late
        self._outstanding: int | None = None  # the step whose answer has not come
        self._is_overdue = False  # whether its deadline has passed
        # Kept, because gRPC cancels a call whose future is collected.
        self._prefills: dict[int, grpc.Future[draft_pb2.PrefillResponse]] = {}
        self._sent_at = 0.0
        self.is_broken = False
        # By sequence id, what stays the same from step to step: made anew, it would be a third of a message's time.
        self._standing: dict[int, tuple[tuple[object, ...], draft_pb2.DraftSequence]] = {}
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
        response = draft_pb2.DraftResponse.FromString(data)
        # Answers come in the order of the messages: one that skips the step awaited, or answers none, is no answer.
        if response.step_id > (self._outstanding or self._num_messages):
            log.warning("step_id is %d in an answer, which no message has: the link ends", response.step_id)
            self.call.cancel()
            return response
        with self._lock:
            is_awaited = False
            if response.step_id == self._outstanding:
                is_awaited, self._outstanding = not self._is_overdue, None
            if is_awaited:
                self._answers.put(response)
        if not is_awaited:
            self._on_late(response)
        return response

    def close(self) -> None:
        """Ends the stream and wakes whoever waits."""
        self.is_broken = True
        self._requests.put(None)
        self._answers.put(None)
        self.call.cancel()

    @property
    def is_busy(self) -> bool:
        """Whether an answer that came too late is still outstanding; one that takes far too long ends the link."""
        if self._outstanding is None:
            return False
        if time.monotonic() - self._sent_at > OVERDUE_S and not self.is_broken:
            log.warning("the drafter has not answered for %.0f s: the link ends", OVERDUE_S)
            self.close()
        return True

    def send(self, jobs: Sequence[DraftJob], closed: Sequence[int], deadline_s: float, traceparent: str = "") -> None:
        """Sends one step, for which the link must not be busy; without jobs it is none, and may go at any time."""
        self._num_messages += 1
        if jobs:
            self._sent_at = time.monotonic()
            with self._lock:
                self._step_id = self._outstanding = self._num_messages
                self._is_overdue = False
        request = draft_pb2.DraftRequest(
            stream_id=self.stream_id,
            step_id=self._num_messages,
            closed_sequence_ids=closed,
            deadline_us=int(deadline_s * 1e6),
            traceparent=traceparent,
        )
        for job in jobs:
            self._write(job, request.sequences.add())
        for sequence_id in closed:
            self._standing.pop(sequence_id, None)
        self._requests.put(request)

    def _write(self, job: DraftJob, message: draft_pb2.DraftSequence) -> None:
        settings, standing = _settings(job), self._standing.get(job.sequence_id)
        if standing is None or standing[0] != settings:
            standing = self._standing[job.sequence_id] = settings, _settings_to_wire(job)
        message.CopyFrom(standing[1])
        message.epoch, message.base_length, message.root_token_id = job.epoch, job.base_length, job.root
        if job.context is not None:
            _write_rows(job.context, message.context)

    def receive(self, timeout_s: float) -> draft_pb2.DraftResponse | None:
        """The answer to the step sent last, or None where it does not come in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            response = self._next(max(deadline - time.monotonic(), 0.0))
            if response is None or response.step_id == self._step_id:  # else its step failed before it was taken
                return response

    def _next(self, timeout_s: float) -> draft_pb2.DraftResponse | None:
        with contextlib.suppress(queue.Empty):
            return self._answers.get(timeout=timeout_s)
        with self._lock:
            with contextlib.suppress(queue.Empty):
                return self._answers.get_nowait()  # it came at the last moment
            self._is_overdue = True
            return None

    def prefill(self, sequence_id: int, epoch: int, chunks: Sequence[ContextRows], traceparent: str = "") -> None:
        """Sends a prompt's context ahead on a stream of its own, without waiting for it to arrive."""
        messages: list[draft_pb2.PrefillRequest] = []
        for rows in chunks:
            message = draft_pb2.PrefillRequest(
                stream_id=self.stream_id, sequence_id=sequence_id, epoch=epoch, traceparent=traceparent
            )
            _write_rows(rows, message.context)
            messages.append(message)
        self._prefills[sequence_id] = self._stub.Prefill.future(iter(messages), timeout=PREFILL_TIMEOUT_S)

    def is_prefilling(self, sequence_id: int) -> bool:
        """Whether context of the sequence is still on its way."""
        call = self._prefills.get(sequence_id)
        return call is not None and not call.done()

    def prefill_refusal(self, sequence_id: int) -> DraftOutcome | None:
        """Why context of the sequence was refused for good, said once; None where it arrived, is on its way, or got
        lost: a step then tells what is missing."""
        if self.is_prefilling(sequence_id) or (call := self._prefills.pop(sequence_id, None)) is None:
            return None
        if not isinstance(call, grpc.Call) or (reason := _FINAL.get(call.code())) is None:
            return None
        return DraftOutcome(None, reason, call.details())

    def end_prefill(self, sequence_id: int) -> None:
        """Forgets context that was sent ahead; what has not arrived need not."""
        call = self._prefills.pop(sequence_id, None)
        if call is not None:
            call.cancel()


def _write_rows(rows: ContextRows, message: draft_pb2.ContextRows) -> None:
    message.start, message.token_ids, message.features = rows.start, int32_to_bytes(rows.token_ids), rows.features
    message.format = draft_pb2.FEATURE_FORMAT_BFLOAT16 if rows.is_bfloat16 else draft_pb2.FEATURE_FORMAT_FLOAT32


def _settings(job: DraftJob) -> tuple[object, ...]:
    return job.algorithm, job.tree_budget, job.width_cap, job.spine, job.sampling


def _settings_to_wire(job: DraftJob) -> draft_pb2.DraftSequence:
    return draft_pb2.DraftSequence(
        sequence_id=job.sequence_id,
        tree=tree_pb2.TreeOptions(
            algorithm=ALGORITHM_TO_WIRE[job.algorithm],
            tree_budget=job.tree_budget,
            width_cap=job.width_cap,
            spine=job.spine,
        ),
        sampling=sampling_to_wire(job.sampling),
    )

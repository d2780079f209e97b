"""DraftService over gRPC: the event loop moves messages, one worker thread owns the drafter and does all the rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from typing import Any

import grpc.aio

from draft_service.api.codec import (
    DrafterFacts,
    check_epoch,
    check_sequences,
    context_from_wire,
    handshake_to_wire,
    result_to_wire,
    step_from_wire,
)
from draft_service.api.streams import StreamRegistry
from draft_service.draft.drafter import Drafter
from draft_service.draft.types import Drafted, Refusal, RefusalReason, SequenceStep, StepOutcome
from draft_service.telemetry import UNWATCHED, Answer, Watch
from draftwood.errors import ContextLengthError, DraftwoodError, InvalidRequestError, OverloadedError
from draftwood.rpc.conventions import errors_to_status
from draftwood.rpc.wire import microseconds
from draftwood.v1 import draft_pb2, draft_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Draft, Prefill and the handshake."""

    def __init__(
        self,
        drafter: Drafter,
        worker: Executor,
        facts: DrafterFacts,
        lease_s: float = 60.0,
        watch: Watch = UNWATCHED,
    ) -> None:
        self._drafter, self._worker, self._watch = drafter, worker, watch
        self._handshake = handshake_to_wire(facts)
        self.streams = StreamRegistry(self._free_stream, lease_s)

    def _free_stream(self, stream_id: int) -> None:
        # In the worker's queue this comes after everything that the stream still had under way.
        self._worker.submit(self._drafter.close_stream, stream_id)

    async def GetDraftModel(
        self, request: draft_pb2.GetDraftModelRequest, context: Context
    ) -> draft_pb2.GetDraftModelResponse:
        """Which draft model is served."""
        return self._handshake

    # A coroutine that writes, not a generator: grpc.aio takes both, its stubs know only the latter.
    async def Draft(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: Context
    ) -> None:
        """Answers a verify engine's steps in order; frees its sequences when the stream ends."""
        stream_id: int | None = None
        loop = asyncio.get_running_loop()
        async with errors_to_status(context):
            try:
                async for request in request_iterator:
                    received = time.perf_counter()
                    if stream_id is None:
                        self.streams.open(request.stream_id)
                        stream_id = request.stream_id
                    elif request.stream_id != stream_id:
                        raise InvalidRequestError(
                            f"stream_id is {request.stream_id}, but this stream began as {stream_id}", field="stream_id"
                        )
                    check_sequences(request.sequences)
                    response = await loop.run_in_executor(self._worker, self._answer, request, received)
                    busy_s = time.perf_counter() - received
                    response.busy_us = microseconds(busy_s)
                    if response.results:
                        self._watch.sent(_answer_of(request, response, busy_s))
                    await context.write(response)
            finally:
                if stream_id is not None:
                    self.streams.end(stream_id)

    def _answer(self, request: draft_pb2.DraftRequest, received: float) -> draft_pb2.DraftResponse:
        """On the worker: one message's step."""
        parts = [step_from_wire(sequence, self._drafter.config) for sequence in request.sequences]
        steps = [part for part in parts if isinstance(part, SequenceStep)]

        def is_late() -> bool:
            return 0 < request.deadline_us < microseconds(time.perf_counter() - received)

        outcome: StepOutcome = self._drafter.step(request.stream_id, steps, request.closed_sequence_ids, is_late)
        served = iter(outcome.results)
        response = draft_pb2.DraftResponse(
            step_id=request.step_id,
            draft_us=microseconds(outcome.draft_s),
            tree_us=microseconds(outcome.tree_s),
        )
        results: list[Drafted | Refusal] = []
        for sequence, part in zip(request.sequences, parts, strict=True):
            result: Drafted | Refusal | None = part if isinstance(part, Refusal) else next(served)
            if result is not None and sequence.HasField("tree"):
                results.append(result)
                response.results.append(result_to_wire(sequence, result))
        if results:
            self._watch.answered(results, outcome)
        return response

    async def Prefill(
        self, request_iterator: AsyncIterator[draft_pb2.PrefillRequest], context: Context
    ) -> draft_pb2.PrefillResponse:
        """Takes rows of prompts, chunk by chunk between other streams' steps."""
        loop, began, traceparent = asyncio.get_running_loop(), time.perf_counter(), ""
        response = draft_pb2.PrefillResponse()
        async with errors_to_status(context):
            async for request in request_iterator:
                traceparent = traceparent or request.traceparent
                is_new = self.streams.expect(request.stream_id)
                try:
                    response.num_rows += await loop.run_in_executor(self._worker, self._take, request)
                except DraftwoodError:
                    if is_new:
                        self.streams.give_up(request.stream_id)
                    raise
        self._watch.prefilled(traceparent, response.num_rows, time.perf_counter() - began)
        return response

    def _take(self, request: draft_pb2.PrefillRequest) -> int:
        """On the worker: one chunk's rows; how many came."""
        check_epoch(request.epoch)
        rows = context_from_wire(request.context, self._drafter.config)
        end, longest = rows.start + rows.features.shape[0], self._drafter.cache.max_context
        if end > longest:
            raise ContextLengthError(f"rows reach position {end}, but max_context is {longest}", field="context")
        refused = self._drafter.take(request.stream_id, request.sequence_id, request.epoch, rows)
        if refused is None:
            return rows.features.shape[0]
        if refused.reason is RefusalReason.CACHE_FULL:
            raise OverloadedError(refused.message, field="context", retry_after_s=1.0)
        raise InvalidRequestError(refused.message, field="context.start")


def _answer_of(request: draft_pb2.DraftRequest, response: draft_pb2.DraftResponse, busy_s: float) -> Answer:
    return Answer(request.traceparent, len(response.results), busy_s, response.draft_us / 1e6, response.tree_us / 1e6)

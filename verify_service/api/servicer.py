"""VerifyService over gRPC: messages in, the engine's events out. The event loop never waits for the model."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc.aio

from draftwood import __version__
from draftwood.memory import peak_memory_bytes
from draftwood.rpc.conventions import errors_to_status
from draftwood.rpc.wire import ALGORITHM_TO_WIRE
from draftwood.v1 import verify_pb2, verify_pb2_grpc
from verify_service.api.codec import Defaults, TargetFacts, event_to_wire, request_from_wire, target_to_wire
from verify_service.core.events import Event, Failed, Finished
from verify_service.core.request import Request, check_request
from verify_service.draft.client import DraftClient
from verify_service.draft.types import DroppedResults
from verify_service.engine.engine import Engine
from verify_service.telemetry.metrics import MeasuredRequest, Telemetry


class VerifyServicer(verify_pb2_grpc.VerifyServiceServicer):
    """One engine's face on the wire."""

    def __init__(
        self,
        engine: Engine,
        client: DraftClient | None,
        defaults: Defaults,
        facts: TargetFacts,
        telemetry: Telemetry,
    ) -> None:
        self.engine, self.client, self.defaults = engine, client, defaults
        self.facts, self.telemetry, self.incarnation = facts, telemetry, random.getrandbits(63)

    @property
    def drafter_status(self) -> str:
        return self.client.status if self.client is not None else "none: no drafter is configured"

    async def GetTargetModel(
        self, request: verify_pb2.GetTargetModelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> verify_pb2.GetTargetModelResponse:
        stream = self.client.stream if self.client is not None else None
        return verify_pb2.GetTargetModelResponse(
            model=target_to_wire(self.facts, self.defaults.limits.max_context),
            incarnation=self.incarnation,
            version=__version__,
            default_algorithm=ALGORITHM_TO_WIRE[self.defaults.algorithm],
            default_tree_budget=self.defaults.tree_budget,
            max_tree_budget=self.defaults.limits.max_tree_budget,
            max_batch=self.engine.scheduler.max_batch,
            drafter_status=self.drafter_status,
            draft_model_id=stream.facts.model_id if stream is not None else "",
        )

    async def GetLoad(
        self, request: verify_pb2.GetLoadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> verify_pb2.GetLoadResponse:
        scheduler = self.engine.scheduler
        dropped = self.client.dropped if self.client is not None else DroppedResults()
        return verify_pb2.GetLoadResponse(
            num_running=len(scheduler.active),
            num_queued=len(scheduler.waiting),
            pages_used=scheduler.pages.num_used,
            pages_total=scheduler.pages.num_pages,
            slots_used=scheduler.slots.num_used,
            slots_total=scheduler.slots.num_slots,
            drafter_status=self.drafter_status,
            rejected_trees=dropped.rejected,
            stale_trees=dropped.stale,
            fallback_steps=self.engine.runner.observer.totals.num_fallback_steps,
            steps=self.engine.num_steps,
            peak_memory_bytes=peak_memory_bytes(),
        )

    async def Generate(  # pyright: ignore[reportIncompatibleMethodOverride] - the stubs know only generators
        self, request: verify_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        # Not a generator: one that is suspended at a yield when its call is cancelled gets to its `finally` only when
        # it is collected. And no callback of the context: that would make the call part of a reference cycle.
        async with errors_to_status(context):
            with self.telemetry.watch() as call:
                parsed = request_from_wire(request, self.defaults, context.peer())
                check_request(parsed, self.defaults.limits)
                await self._answer(call.received(parsed), context, call)

    async def _answer(
        self, request: Request, context: grpc.aio.ServicerContext[Any, Any], call: MeasuredRequest
    ) -> None:
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def emit(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        sequence_id = self.engine.submit(request, emit, timeout_s=context.time_remaining())
        try:
            while True:
                event = await events.get()
                if isinstance(event, Failed):
                    raise event.error
                call.notice(event)
                await context.write(event_to_wire(event, request))
                if isinstance(event, Finished):
                    return
        finally:
            self.engine.cancel(sequence_id)

"""VerifyService over gRPC: messages in, the engine's events out. The event loop never waits for the model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio

from draftwood import __version__
from draftwood.memory import peak_memory_bytes
from draftwood.rpc.conventions import errors_to_status
from draftwood.rpc.wire import ALGORITHM_TO_WIRE
from draftwood.v1 import verify_pb2, verify_pb2_grpc
from verify_service.api.codec import (
    finished_to_wire,
    request_from_wire,
    started_to_wire,
    target_to_wire,
    tokens_to_wire,
)
from verify_service.api.defaults import Defaults, TargetFacts
from verify_service.api.request_hooks import RequestHooks
from verify_service.core.events import Event, Failed, Finished, Started, Tokens
from verify_service.core.request import Request, check_request
from verify_service.draft.client import DraftClient
from verify_service.draft.types import DroppedResults
from verify_service.engine.engine import Engine


class VerifyServicer(verify_pb2_grpc.VerifyServiceServicer):
    """One engine's face on the wire."""

    def __init__(
        self,
        engine: Engine,
        client: DraftClient | None,
        defaults: Defaults,
        facts: TargetFacts,
        watch: Callable[[], RequestHooks] = RequestHooks,
    ) -> None:
        self.engine, self.client, self.defaults, self.facts = engine, client, defaults, facts
        self.watch = watch  # makes one for each Generate call

    @property
    def drafter_status(self) -> str:
        """For people."""
        return self.client.status if self.client is not None else "none: no drafter is configured"

    async def GetTargetModel(
        self,
        request: verify_pb2.GetTargetModelRequest,
        context: grpc.aio.ServicerContext[verify_pb2.GetTargetModelRequest, verify_pb2.GetTargetModelResponse],
    ) -> verify_pb2.GetTargetModelResponse:
        stream = self.client.stream if self.client is not None else None
        return verify_pb2.GetTargetModelResponse(
            model=target_to_wire(self.facts, self.defaults.limits.max_context),
            incarnation=self.facts.incarnation,
            version=__version__,
            default_algorithm=ALGORITHM_TO_WIRE[self.defaults.algorithm],
            default_tree_budget=self.defaults.tree_budget,
            max_tree_budget=self.defaults.limits.max_tree_budget,
            max_batch=self.engine.scheduler.max_batch,
            drafter_status=self.drafter_status,
            draft_model_id=stream.facts.model_id if stream is not None else "",
        )

    async def GetLoad(
        self,
        request: verify_pb2.GetLoadRequest,
        context: grpc.aio.ServicerContext[verify_pb2.GetLoadRequest, verify_pb2.GetLoadResponse],
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
            fallback_steps=self.engine.runner.observer.totals.fallback_steps,
            steps=self.engine.num_steps,
            peak_memory_bytes=peak_memory_bytes(),
        )

    async def Generate(  # pyright: ignore[reportIncompatibleMethodOverride] - the stubs know only generators
        self,
        request: verify_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[verify_pb2.GenerateRequest, verify_pb2.GenerateResponse],
    ) -> None:
        # Not a generator: one that is suspended at a yield when its call is cancelled gets to its `finally` only when
        # it is collected. And no callback of the context: that would make the call part of a reference cycle.
        watch = self.watch()
        try:
            async with errors_to_status(context), watch.errors():
                parsed = request_from_wire(request, self.defaults, context.peer())
                check_request(parsed, self.defaults.limits)
                await self._answer(watch.received(parsed), context, watch)
        finally:
            watch.gone()

    async def _answer(
        self,
        request: Request,
        context: grpc.aio.ServicerContext[verify_pb2.GenerateRequest, verify_pb2.GenerateResponse],
        watch: RequestHooks,
    ) -> None:
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def emit(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        sequence_id = self.engine.submit(request, emit, timeout_s=_time_left(context))
        try:
            while True:
                match await events.get():
                    case Started() as started:
                        await context.write(started_to_wire(started, request))
                    case Tokens() as tokens:
                        watch.grew()
                        await context.write(tokens_to_wire(tokens))
                    case Finished() as finished:
                        watch.finished(finished)
                        await context.write(finished_to_wire(finished))
                        return
                    case Failed(error):
                        raise error
        finally:
            self.engine.cancel(sequence_id)


def _time_left(
    context: grpc.aio.ServicerContext[verify_pb2.GenerateRequest, verify_pb2.GenerateResponse],
) -> float | None:
    """Seconds to the call's deadline."""
    left: float | None = context.time_remaining()
    return left

"""A verify service that plays a script: a real grpc.aio server, without a model."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from draftwood.errors import DraftwoodError
from draftwood.rpc import conventions as rpc
from draftwood.security.security import OPEN, Security
from draftwood.v1 import verify_pb2, verify_pb2_grpc

EOS = 2
VOCAB_SIZE = 8192
MAX_CONTEXT = 2048
MAX_BATCH = 8
NODES_PER_STEP = 7


@dataclass
class Script:
    """What one answer is. Without `is_obedient` the limits of the request are ignored, as a faulty service would."""

    token_ids: list[int] = field(default_factory=lambda: [EOS])
    chunk_sizes: tuple[int, ...] = (1,)  # used in turn
    is_obedient: bool = True
    error_at_start: DraftwoodError | None = None
    error_after: DraftwoodError | None = None  # once the tokens are sent
    hang_at_start: bool = False  # until released
    hang_after: bool = False  # likewise, once the tokens are sent
    reason: verify_pb2.FinishReason.ValueType | None = None


class FakeVerify(verify_pb2_grpc.VerifyServiceServicer):
    """Plays `script` for every request and keeps what it was asked."""

    def __init__(self) -> None:
        self.num_running = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.health = health.aio.HealthServicer()
        self.forget()

    def forget(self) -> None:
        """Back to the beginning, for the next test."""
        self.script = Script()
        self.tokenizer_hash = ""
        self.requests: list[verify_pb2.GenerateRequest] = []
        self.most_running = 0
        self.began = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.released = asyncio.Event()

    async def GetTargetModel(self, request: Any, context: Any) -> verify_pb2.GetTargetModelResponse:
        model = verify_pb2.TargetModel(
            model_id="sprout",
            vocab_size=VOCAB_SIZE,
            max_context=MAX_CONTEXT,
            stop_token_ids=[EOS],
            tokenizer_hash=self.tokenizer_hash,
        )
        return verify_pb2.GetTargetModelResponse(
            model=model,
            incarnation=1,
            version="0.0.test",
            max_tree_budget=63,
            max_batch=MAX_BATCH,
            drafter_status="ready",
            draft_model_id="sprout-DFlash-b16",
        )

    async def GetLoad(self, request: Any, context: Any) -> verify_pb2.GetLoadResponse:
        return verify_pb2.GetLoadResponse(num_running=self.num_running, drafter_status="ready")

    async def Generate(  # pyright: ignore[reportIncompatibleMethodOverride] - the stubs know only generators
        self, request: verify_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, verify_pb2.GenerateResponse]
    ) -> None:
        """Writes rather than yields: a generator would not see a cancellation that comes while a message is sent."""
        self.requests.append(request)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        self.idle.clear()
        self.began.set()
        try:
            async with rpc.errors_to_status(context):
                async for response in self._play(request):
                    await context.write(response)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.num_running -= 1
            if not self.num_running:
                self.idle.set()

    async def _play(self, request: verify_pb2.GenerateRequest) -> AsyncIterator[verify_pb2.GenerateResponse]:
        script = self.script
        if script.error_at_start is not None:
            raise script.error_at_start
        if script.hang_at_start:
            await self.released.wait()
        yield verify_pb2.GenerateResponse(
            started=verify_pb2.GenerateStarted(request_id=request.request_id, seed=request.sampling.seed)
        )
        token_ids, reason = script.token_ids, verify_pb2.FINISH_REASON_STOP
        if script.is_obedient:
            token_ids, reason = obey(request, token_ids)
        num_chunks = 0
        for part in split(token_ids, script.chunk_sizes):
            yield verify_pb2.GenerateResponse(chunk=chunk(request, part, is_step=num_chunks > 0))
            num_chunks += 1
        if script.error_after is not None:
            raise script.error_after
        if script.hang_after:
            await self.released.wait()
        yield verify_pb2.GenerateResponse(
            finished=verify_pb2.GenerateFinished(reason=script.reason or reason, stats=stats(token_ids, num_chunks))
        )


def obey(
    request: verify_pb2.GenerateRequest, token_ids: list[int]
) -> tuple[list[int], verify_pb2.FinishReason.ValueType]:
    """The tokens up to the first that ends the answer, and why it ends."""
    stops = {*request.stop_token_ids, *(() if request.ignore_model_stop else (EOS,))}
    kept = token_ids[: request.max_new_tokens]
    for i, token_id in enumerate(kept):
        if token_id in stops and i >= request.min_new_tokens:
            return kept[: i + 1], verify_pb2.FINISH_REASON_STOP
    return kept, verify_pb2.FINISH_REASON_LENGTH


def split(token_ids: list[int], sizes: tuple[int, ...]) -> Iterator[list[int]]:
    """The tokens in chunks of the sizes, in turn."""
    start = 0
    for size in itertools.cycle(sizes):
        if start >= len(token_ids):
            return
        yield token_ids[start : start + size]
        start += size


def chunk(request: verify_pb2.GenerateRequest, token_ids: list[int], *, is_step: bool) -> verify_pb2.TokenChunk:
    """Token t has the log-probability -t / 1000; the likeliest are the token itself and the ids from 300 on."""
    message = verify_pb2.TokenChunk(token_ids=token_ids)
    if is_step:
        message.num_drafted_tokens, message.num_accepted_tokens = NODES_PER_STEP, len(token_ids) - 1
    if request.HasField("num_log_probs"):
        for token_id in token_ids:
            top = [token_id, *range(300, 320)][: request.num_log_probs]
            message.log_probs.add(
                token_id=token_id,
                log_prob=-token_id / 1000,
                top_token_ids=top,
                top_log_probs=[-token_id / 1000, *[float("-inf")] * 20][: len(top)],
            )
    return message


def stats(token_ids: list[int], num_chunks: int) -> verify_pb2.GenerateStats:
    """Every chunk but the first is a step."""
    num_steps = max(0, num_chunks - 1)
    return verify_pb2.GenerateStats(
        num_generated_tokens=len(token_ids),
        num_steps=num_steps,
        num_drafted_steps=num_steps,
        num_drafted_tokens=NODES_PER_STEP * num_steps,
        num_accepted_tokens=max(0, len(token_ids) - num_chunks),
        num_fallback_steps=0,
        queue_us=1000,
        prefill_us=2000,
        decode_us=3000,
        draft_us=400,
        tree_us=50,
        verify_us=1500,
        accept_us=60,
        commit_us=70,
        transport_p50_us=300,
    )


@asynccontextmanager
async def serve(fake: FakeVerify, port: int = 0, security: Security = OPEN) -> AsyncGenerator[int]:
    """Serves the fake on a port, which it gives."""
    server = security.server()
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(fake, server)
    health_pb2_grpc.add_HealthServicer_to_server(fake.health, server)
    await fake.health.set("", health_pb2.HealthCheckResponse.SERVING)
    port = security.listen(server, "127.0.0.1", port)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)

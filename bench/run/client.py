"""Client of the verify service for benchmarks. Proto types stop here: the rest of `bench` sees bench.figures.values."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Self

import grpc.aio

from bench.figures.values import SHADOW, Answer, Configuration, Stats, Target, scalars
from draftwood.errors import InternalError
from draftwood.rpc.conventions import from_rpc_error
from draftwood.rpc.wire import ALGORITHM_TO_WIRE, sampling_to_wire
from draftwood.sampling import SamplingParams
from draftwood.security.security import OPEN, Security
from draftwood.v1 import verify_pb2, verify_pb2_grpc

CALL_TIMEOUT_S = 600.0
HANG_UP_S = 0.02  # after which a request that nothing is waited for is given up


class VerifyClient:
    """One channel to a verify service; an async context manager."""

    def __init__(self, address: str, security: Security = OPEN) -> None:
        self._channel = security.channel(address)
        self._stub: verify_pb2_grpc.VerifyServiceAsyncStub = verify_pb2_grpc.VerifyServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._channel.close()

    async def target(self) -> Target:
        """The served model."""
        try:
            reply = await self._stub.GetTargetModel(verify_pb2.GetTargetModelRequest(), timeout=10.0)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return Target(
            model_id=reply.model.model_id,
            model_type=reply.model.model_type,
            dtype=reply.model.dtype,
            tokenizer_hash=reply.model.tokenizer_hash,
            max_tree_budget=reply.max_tree_budget,
            max_batch=reply.max_batch,
            drafter_status=reply.drafter_status,
            draft_model_id=reply.draft_model_id,
        )

    async def peak_memory_bytes(self) -> int:
        """Peak resident memory of the verify service."""
        try:
            return (await self._stub.GetLoad(verify_pb2.GetLoadRequest(), timeout=10.0)).peak_memory_bytes
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def load(self) -> dict[str, int]:
        """What is held and waited for right now, by name."""
        try:
            load = await self._stub.GetLoad(verify_pb2.GetLoadRequest(), timeout=10.0)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return {
            "running": load.num_running, "queued": load.num_queued, "pages": load.pages_used, "slots": load.slots_used,
        }  # fmt: skip

    async def generate(
        self, prompt: Sequence[int], configuration: Configuration, *, max_new: int, sampling: SamplingParams
    ) -> Answer:
        """Decodes one prompt to its end."""
        request = _request(prompt, configuration, max_new=max_new, sampling=sampling)
        token_ids: list[int] = []
        try:
            async for response in self._stub.Generate(request, timeout=CALL_TIMEOUT_S):
                token_ids += response.chunk.token_ids
                if response.WhichOneof("event") == "finished":
                    return _finish(token_ids, response.finished)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        raise InternalError("the verify service ended an answer without its figures")

    async def stream(
        self, prompt: Sequence[int], configuration: Configuration, *, max_new: int, ignore_stop: bool = False
    ) -> AsyncGenerator[list[int]]:
        """Greedy tokens message by message; the first message has none and says that the prompt is in the caches.
        Closing the iterator hangs up."""
        request = _request(prompt, configuration, max_new=max_new, sampling=SamplingParams())
        request.ignore_model_stop = ignore_stop
        call = self._stub.Generate(request, timeout=CALL_TIMEOUT_S)
        try:
            async for response in call:
                yield list(response.chunk.token_ids)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    async def hang_up(
        self, prompt: Sequence[int], configuration: Configuration, *, max_new: int, num_messages: int
    ) -> None:
        """Sends a request and gives it up after so many messages of its answer, at its end at the latest; with none,
        once the service has it."""
        async with aclosing(self.stream(prompt, configuration, max_new=max_new)) as messages:
            if num_messages == 0:
                with suppress(TimeoutError):
                    await asyncio.wait_for(anext(messages, None), timeout=HANG_UP_S)
            for _ in range(num_messages):
                await anext(messages, None)


def _request(
    prompt: Sequence[int], configuration: Configuration, *, max_new: int, sampling: SamplingParams
) -> verify_pb2.GenerateRequest:
    is_shadow = configuration.algorithm == SHADOW
    return verify_pb2.GenerateRequest(
        prompt_token_ids=prompt,
        max_new_tokens=max_new,
        sampling=sampling_to_wire(sampling),
        algorithm=ALGORITHM_TO_WIRE["ddtree" if is_shadow else configuration.algorithm],
        tree_budget=configuration.tree_budget or None,
        shadow_linear=is_shadow,
    )


def _finish(token_ids: list[int], message: verify_pb2.GenerateFinished) -> Answer:
    return Answer(tuple(token_ids), _stats(message.stats))


def _stats(message: verify_pb2.GenerateStats) -> Stats:
    return Stats(
        **{name: getattr(message, name) for name in scalars(Stats)},
        accepted_histogram=tuple(message.accepted_histogram),
        drafted_by_depth=tuple(message.drafted_by_depth),
        transport_p50_us=(message.transport_p50_us,) if message.num_drafted_steps else (),
    )

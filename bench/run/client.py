"""Client of the verify service for benchmarks. Proto types stop here: the rest of `bench` sees the values below."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Self

import grpc.aio

from draftwood.errors import InternalError
from draftwood.rpc.conventions import from_rpc_error
from draftwood.rpc.wire import ALGORITHM_TO_WIRE, sampling_to_wire
from draftwood.sampling import SamplingParams
from draftwood.security.security import OPEN, Security
from draftwood.v1 import verify_pb2, verify_pb2_grpc

CALL_TIMEOUT_S = 600.0
HANG_UP_S = 0.02  # after which a request that nothing is waited for is given up
SHADOW = "shadow"


@dataclass(frozen=True)
class Configuration:
    """A way to decode: an algorithm and its budget in nodes without the root. `shadow` is a chain with the tree
    verified beside it."""

    algorithm: str
    tree_budget: int = 0

    @property
    def name(self) -> str:
        """As tables and plots call it."""
        return self.algorithm if self.tree_budget == 0 else f"{self.algorithm} {self.tree_budget}"


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Figures of one answer, or of several added up."""

    num_steps: int = 0
    num_drafted_steps: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_fallback_steps: int = 0
    shadow_tree_tokens: int = 0
    decode_us: int = 0
    prefill_us: int = 0
    queue_us: int = 0
    draft_us: int = 0
    tree_us: int = 0
    verify_us: int = 0
    accept_us: int = 0
    commit_us: int = 0
    drafter_busy_us: int = 0
    accepted_histogram: tuple[int, ...] = ()  # entry d: steps that accepted exactly d
    drafted_by_depth: tuple[int, ...] = ()  # entry d: drafted steps whose tree reached depth d + 1
    transport_p50_us: tuple[int, ...] = ()  # one an answer

    @classmethod
    def from_proto(cls, message: verify_pb2.GenerateStats) -> Self:
        """The message's values."""
        return cls(
            **{name: getattr(message, name) for name in _scalars(cls)},
            accepted_histogram=tuple(message.accepted_histogram),
            drafted_by_depth=tuple(message.drafted_by_depth),
            transport_p50_us=(message.transport_p50_us,) if message.num_drafted_steps else (),
        )

    def __add__(self, other: Stats) -> Stats:
        return Stats(
            **{name: getattr(self, name) + getattr(other, name) for name in _scalars(Stats)},
            accepted_histogram=_add(self.accepted_histogram, other.accepted_histogram),
            drafted_by_depth=_add(self.drafted_by_depth, other.drafted_by_depth),
            transport_p50_us=self.transport_p50_us + other.transport_p50_us,
        )


def _scalars(kind: type[Stats]) -> list[str]:
    """Names of the fields that are whole numbers."""
    return [spec.name for spec in fields(kind) if spec.default == 0]


def _add(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))


@dataclass(frozen=True)
class Answer:
    """One decoded prompt; `token_ids` include the stop token."""

    token_ids: tuple[int, ...]
    stats: Stats


@dataclass(frozen=True, kw_only=True)
class Target:
    """What the verify service says of itself."""

    model_id: str
    model_type: str
    dtype: str
    tokenizer_hash: str
    max_tree_budget: int
    max_batch: int
    drafter_status: str
    draft_model_id: str


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
    return Answer(tuple(token_ids), Stats.from_proto(message.stats))

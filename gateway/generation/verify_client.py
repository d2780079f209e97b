"""Client of the verify service. Proto types stop here: the rest of the gateway sees the values below."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwood.errors import DraftwoodError, InternalError, InvalidRequestError, UnauthenticatedError, UnavailableError
from draftwood.rpc import conventions as rpc
from draftwood.rpc import wire
from draftwood.sampling import SamplingParams
from draftwood.security.security import OPEN, Security
from draftwood.v1 import verify_pb2, verify_pb2_grpc
from gateway.generation.outcome import Stats

CONTROL_TIMEOUT_S = 5.0
TARGET_MAX_AGE_S = 5.0
RETRY_AFTER_S = 1.0
REQUEST_FIELDS = {
    "prompt_token_ids": "prompt",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "width_cap": "tree_width_cap",
    "spine": "tree_spine",
    "num_log_probs": "logprobs",
    "ignore_model_stop": "ignore_eos",
}


@dataclass(frozen=True, slots=True)
class Target:
    """The served target model and its limits."""

    model_id: str
    vocab_size: int
    max_context: int
    stop_token_ids: frozenset[int]
    tokenizer_hash: str
    max_tree_budget: int
    version: str
    drafter_status: str
    draft_model_id: str
    max_batch: int = 1


@dataclass(frozen=True, slots=True)
class Load:
    """What the verify service is doing, and whether it calls itself healthy."""

    is_serving: bool
    num_running: int
    num_queued: int
    drafter_status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """One prompt to decode."""

    request_id: str
    prompt_token_ids: Sequence[int]
    max_new_tokens: int
    sampling: SamplingParams
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_model_stop: bool = False
    algorithm: str | None = None
    tree_budget: int | None = None
    width_cap: int | None = None
    spine: bool | None = None
    num_log_probs: int | None = None
    traceparent: str = ""
    client: str = ""

    def to_proto(self) -> verify_pb2.GenerateRequest:
        """The wire request; what is None stays absent."""
        request = verify_pb2.GenerateRequest(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            max_new_tokens=self.max_new_tokens,
            sampling=wire.sampling_to_wire(self.sampling),
            stop_token_ids=self.stop_token_ids,
            ignore_model_stop=self.ignore_model_stop,
            tree_budget=self.tree_budget,
            width_cap=self.width_cap,
            spine=self.spine,
            num_log_probs=self.num_log_probs,
            traceparent=self.traceparent,
            client=self.client,
        )
        if self.min_new_tokens:
            request.min_new_tokens = self.min_new_tokens
        if self.algorithm is not None:
            request.algorithm = wire.ALGORITHM_TO_WIRE[self.algorithm]
        return request


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """Log-probabilities at one position: of the token drawn, and of the likeliest, likeliest first."""

    token_id: int
    log_prob: float
    top: tuple[tuple[int, float], ...]

    @classmethod
    def from_proto(cls, message: verify_pb2.TokenLogProbs) -> Self:
        """The message's values."""
        return cls(
            message.token_id, message.log_prob, tuple(zip(message.top_token_ids, message.top_log_probs, strict=True))
        )


@dataclass(frozen=True, slots=True)
class Started:
    """The request was admitted and its prompt is in the caches."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Newly committed tokens of a step, and what it drafted; `log_probs` is empty or as long as `token_ids`."""

    token_ids: list[int]
    log_probs: list[TokenLogProbs]
    num_drafted_tokens: int
    num_accepted_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer, by a stop token or by length."""

    is_stop: bool
    stats: Stats


Event = Started | Chunk | Finished


class VerifyClient:
    """One channel to the verify service. Errors come out as DraftwoodError, with field names as users know them."""

    def __init__(self, address: str, security: Security = OPEN) -> None:
        self.address = address
        self._channel = security.channel(address)
        self._stub: Any = verify_pb2_grpc.VerifyServiceStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        self._target: Target | None = None
        self._asked_at = 0.0

    async def close(self) -> None:
        """Cancels what is running and closes the channel."""
        await self._channel.close()

    async def target(self, *, fresh: bool = False) -> Target:
        """The served model. Asked for again when the answer is some seconds old, after a failure, or if `fresh`."""
        if self._target is None or fresh or time.monotonic() - self._asked_at > TARGET_MAX_AGE_S:
            reply = await self._ask(
                self._stub.GetTargetModel(verify_pb2.GetTargetModelRequest(), timeout=CONTROL_TIMEOUT_S)
            )
            self._target, self._asked_at = _target(reply), time.monotonic()
        return self._target

    async def load(self) -> Load:
        """Load and health; a service without the health protocol counts as healthy."""
        request = verify_pb2.GetLoadRequest()
        load = await self._ask(self._stub.GetLoad(request, timeout=CONTROL_TIMEOUT_S))
        is_serving = True
        try:
            check = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=CONTROL_TIMEOUT_S)
            is_serving = check.status == health_pb2.HealthCheckResponse.SERVING
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNIMPLEMENTED:
                raise self._failure(error) from error
        return Load(is_serving, load.num_running, load.num_queued, load.drafter_status)

    async def generate(self, options: GenerateOptions, timeout_s: float) -> AsyncGenerator[Event]:
        """Events of one answer. Closing the iterator or cancelling the task that reads it cancels the call at once."""
        call = self._stub.Generate(options.to_proto(), timeout=timeout_s)
        try:
            async for message in call:
                yield _event(message)
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from error
        finally:
            call.cancel()

    async def _ask(self, call: Any) -> Any:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from error
        except asyncio.CancelledError:
            call.cancel()
            raise

    def _failure(self, error: grpc.aio.AioRpcError) -> DraftwoodError:
        self._target = None
        failure = rpc.from_rpc_error(error)
        # A token that is refused is between the services: whoever asked the gateway did nothing wrong.
        if isinstance(failure, UnavailableError | UnauthenticatedError):
            text = f"the verify service at {self.address} is not available: {failure.message}"
            return UnavailableError(text, retry_after_s=failure.retry_after_s or RETRY_AFTER_S)
        if isinstance(failure, InvalidRequestError) and failure.field in REQUEST_FIELDS:
            failure.field = REQUEST_FIELDS[failure.field]
        return failure


def _target(reply: verify_pb2.GetTargetModelResponse) -> Target:
    return Target(
        model_id=reply.model.model_id,
        vocab_size=reply.model.vocab_size,
        max_context=reply.model.max_context,
        stop_token_ids=frozenset(reply.model.stop_token_ids),
        tokenizer_hash=reply.model.tokenizer_hash,
        max_tree_budget=reply.max_tree_budget,
        version=reply.version,
        drafter_status=reply.drafter_status,
        draft_model_id=reply.draft_model_id,
        max_batch=max(1, reply.max_batch),
    )


def _event(message: verify_pb2.GenerateResponse) -> Event:
    match message.WhichOneof("event"):
        case "started":
            return Started()
        case "chunk":
            return _chunk(message.chunk)
        case "finished":
            return _finished(message.finished)
        case None:
            raise InternalError("the verify service sent an empty GenerateResponse")


def _chunk(message: verify_pb2.TokenChunk) -> Chunk:
    return Chunk(
        token_ids=list(message.token_ids),
        log_probs=[TokenLogProbs.from_proto(entry) for entry in message.log_probs],
        num_drafted_tokens=message.num_drafted_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
    )


def _finished(message: verify_pb2.GenerateFinished) -> Finished:
    stats = message.stats
    return Finished(
        is_stop=message.reason == verify_pb2.FINISH_REASON_STOP,
        stats=Stats(
            num_steps=stats.num_steps,
            num_drafted_tokens=stats.num_drafted_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            num_fallback_steps=stats.num_fallback_steps,
            draft_ms=stats.draft_us / 1000,
            tree_ms=stats.tree_us / 1000,
            verify_ms=stats.verify_us / 1000,
            accept_ms=stats.accept_us / 1000,
            commit_ms=stats.commit_us / 1000,
            transport_p50_ms=stats.transport_p50_us / 1000,
            prefill_ms=stats.prefill_us / 1000,
            queue_ms=stats.queue_us / 1000,
            decode_ms=stats.decode_us / 1000,
        ),
    )

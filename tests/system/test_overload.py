"""More requests than there is room for, and a stop in the middle of work: real processes on real ports."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwood.errors import DraftwoodError, OverloadedError, UnavailableError
from draftwood.rpc.conventions import from_rpc_error, open_channel
from draftwood.v1 import tree_pb2, verify_pb2, verify_pb2_grpc
from tests.system.processes import Process

pytestmark = pytest.mark.timeout(300)

REQUESTS, QUEUE, BATCH, NEW_TOKENS = 200, 32, 8, 8
DEADLINE_S = 240.0
SERVICE = "draftwood.v1.VerifyService"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Process]:
    args = ["--port", "0", "--draft", "none", "--max-queue", str(QUEUE), "--max-batch", str(BATCH)]
    process = Process("verify_service", [*args, "--drain-timeout-s", "60"], tmp_path / "verify.log")
    try:
        yield process.until_ready()
    finally:
        process.kill()


def request(**values: Any) -> verify_pb2.GenerateRequest:
    given: dict[str, Any] = {
        "prompt_token_ids": [5, 9, 60, 33, 7], "max_new_tokens": NEW_TOKENS, "ignore_model_stop": True,
        "algorithm": tree_pb2.ALGORITHM_NONE,
    }  # fmt: skip
    return verify_pb2.GenerateRequest(**(given | values))


async def outcome(stub: Any) -> list[int] | DraftwoodError:
    """The tokens, or the error that came instead."""
    tokens: list[int] = []
    try:
        async for message in stub.Generate(request(), timeout=DEADLINE_S):
            tokens += message.chunk.token_ids
            if message.HasField("finished"):
                return tokens
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the stream ended without an end")


async def rest_of(call: Any) -> list[int]:
    """Tokens to the end of a call that is being read already."""
    tokens: list[int] = []
    while message := await call.read():
        tokens += message.chunk.token_ids
    return tokens


async def health_of(channel: grpc.aio.Channel, service: str = SERVICE) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)).status


async def test_two_hundred_at_once_and_then_a_stop(service: Process) -> None:
    """Each is answered, or refused with a retry time; the service is healthy and empty afterwards. A stop lets accepted
    requests end and refuses new ones."""
    async with open_channel(service.address) as channel:
        stub: Any = verify_pb2_grpc.VerifyServiceStub(channel)
        truth = await outcome(stub)
        outcomes = await asyncio.gather(*(outcome(stub) for _ in range(REQUESTS)))
        answers = [tokens for tokens in outcomes if isinstance(tokens, list)]
        refusals = [error for error in outcomes if isinstance(error, OverloadedError)]
        assert len(answers) + len(refusals) == REQUESTS, Counter(map(repr, outcomes))
        assert len(answers) >= QUEUE + BATCH
        assert refusals
        assert all(tokens == truth for tokens in answers)
        assert all(error.retry_after_s is not None and error.retry_after_s >= 1 for error in refusals)
        load = await stub.GetLoad(verify_pb2.GetLoadRequest(), timeout=10)
        assert (load.num_running, load.num_queued, load.pages_used, load.slots_used) == (0, 0, 0, 0)
        assert await health_of(channel) == health_pb2.HealthCheckResponse.SERVING
        assert await outcome(stub) == truth
        length = 100
        call = stub.Generate(request(max_new_tokens=length), timeout=DEADLINE_S)
        assert (await call.read()).HasField("started")
        service.signal(signal.SIGTERM)
        while await health_of(channel) != health_pb2.HealthCheckResponse.NOT_SERVING:
            pass
        refused = await outcome(stub)
        while isinstance(refused, list):  # the engine hears of the stop a moment after health does
            refused = await outcome(stub)
        assert isinstance(refused, UnavailableError)
        assert refused.retry_after_s == 60
        assert len(await rest_of(call)) == length
    assert service.exit_status() == 0


async def test_a_second_signal_does_not_wait(service: Process) -> None:
    async with open_channel(service.address) as channel:
        stub: Any = verify_pb2_grpc.VerifyServiceStub(channel)
        call = stub.Generate(request(max_new_tokens=1900), timeout=DEADLINE_S)
        assert (await call.read()).HasField("started")
        service.signal(signal.SIGTERM)
        while await health_of(channel) != health_pb2.HealthCheckResponse.NOT_SERVING:
            pass
        service.signal(signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest_of(call)
        error = from_rpc_error(caught.value)
        assert isinstance(error, UnavailableError)
        assert "going down" in error.message
        assert error.retry_after_s is not None
    assert service.exit_status() == 0

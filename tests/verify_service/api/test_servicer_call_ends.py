"""What is left of a call once it has ended, whichever way."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch

from draftwood.rpc.conventions import SERVER_OPTIONS, open_channel
from draftwood.v1 import verify_pb2, verify_pb2_grpc
from tests.verify_service.harness import config_of
from tests.verify_service.models import save_tiny
from verify_service.api.servicer import VerifyServicer
from verify_service.build import build
from verify_service.telemetry.metrics import Telemetry

NUM_CALLS = 40


@pytest.fixture
async def stub(tmp_path: Path) -> AsyncIterator[Any]:
    torch.set_num_threads(1)
    save_tiny("llama", tmp_path, num_hidden_layers=1)
    service = build(config_of(tmp_path, max_batch=8, max_queue=NUM_CALLS))
    service.engine.start()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    servicer = VerifyServicer(service.engine, None, service.defaults, service.facts, Telemetry(service.engine, None))
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield verify_pb2_grpc.VerifyServiceStub(channel)
    await server.stop(0)
    await asyncio.to_thread(service.engine.stop)


def request(num_tokens: int) -> verify_pb2.GenerateRequest:
    return verify_pb2.GenerateRequest(prompt_token_ids=[5, 6, 7], max_new_tokens=num_tokens, ignore_model_stop=True)


def num_alive(kind: str) -> int:
    return sum(type(thing).__name__ == kind for thing in gc.get_objects())


async def until_idle(stub: Any) -> None:
    async with asyncio.timeout(20):
        while True:
            load = await stub.GetLoad(verify_pb2.GetLoadRequest())
            if not load.num_running and not load.num_queued:
                return
            await asyncio.sleep(0.01)


async def test_ended_calls_are_gone_without_the_cycle_collector(stub: Any) -> None:
    gc.collect()
    gc.disable()
    try:
        for i in range(NUM_CALLS):
            call = stub.Generate(request(8))
            if i % 4 == 0:
                await call.read()
                call.cancel()
            else:
                assert [message async for message in call][-1].HasField("finished")
            del call
        await until_idle(stub)
        assert num_alive("RPCState") < NUM_CALLS // 2
    finally:
        gc.enable()


async def test_hang_ups_at_any_moment_are_no_failures(stub: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    calls = [stub.Generate(request(64)) for _ in range(NUM_CALLS)]
    for i, call in enumerate(calls):
        for _ in range(i % 5):
            await call.read()
        call.cancel()
    await until_idle(stub)
    assert caplog.messages == []

"""A gateway over a scripted verify service, both real servers on free ports, and clients for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import openai
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2

from draftwood.config import GatewayConfig
from gateway.api.served_model import ServedModel
from gateway.http.http_server import Server
from gateway.text.tokenizer import Tokenizer
from tests.gateway.fake_verify import FakeVerify, serve


@dataclass
class Stand:
    """The gateway under test, what is behind it and who talks to it."""

    url: str
    verify: FakeVerify
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI


@asynccontextmanager
async def running_gateway(config: GatewayConfig, model: ServedModel) -> AsyncGenerator[str]:
    """Serves the gateway in this process and gives its address."""
    server, ready = Server.bind(config, model), asyncio.Event()
    task = asyncio.create_task(server.serve_until_stopped(ready.set))
    await ready.wait()
    try:
        yield server.address
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def stand_for(config: GatewayConfig, model: ServedModel, fake: FakeVerify) -> AsyncGenerator[Stand]:
    """Clients without retries, proxies and certificates."""
    transport = httpx.AsyncHTTPTransport(verify=False)
    inner = openai.DefaultAsyncHttpxClient(verify=False, trust_env=False)
    async with (
        running_gateway(config, model) as url,
        httpx.AsyncClient(transport=transport, base_url=url) as http,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=inner) as client,
    ):
        yield Stand(url, fake, http, client)


@pytest.fixture(scope="session")
def model() -> ServedModel:
    return ServedModel.load(GatewayConfig())


@pytest.fixture(scope="session")
def tokenizer(model: ServedModel) -> Tokenizer:
    return model.tokenizer


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_stand(model: ServedModel) -> AsyncIterator[Stand]:
    """Servers take a fifth of a second to stop, so that tests share one pair."""
    fake = FakeVerify()
    async with serve(fake) as port:
        config = GatewayConfig(port=0, verify=f"127.0.0.1:{port}", max_body_bytes=1_000_000)
        async with stand_for(config, model, fake) as stand:
            yield stand


@pytest_asyncio.fixture(loop_scope="session")
async def stand(shared_stand: Stand) -> AsyncIterator[Stand]:
    yield shared_stand
    async with asyncio.timeout(2):
        await shared_stand.verify.idle.wait()  # every call must have ended with its test
    shared_stand.verify.forget()
    await shared_stand.verify.health.set("", health_pb2.HealthCheckResponse.SERVING)
    await shared_stand.http.get("/health")  # the gateway forgets what the test made it believe

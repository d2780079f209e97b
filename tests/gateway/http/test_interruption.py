"""Connections that nothing comes on, and requests that a stop interrupts."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from draftwood.config import GatewayConfig
from gateway.api.served_model import ServedModel
from tests.gateway.conftest import running_gateway
from tests.gateway.fake_verify import FakeVerify, Script, serve

pytestmark = pytest.mark.asyncio(loop_scope="session")

MESSAGES: Any = [{"role": "user", "content": "Say something."}]
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "script", [Script(hang_at_start=True), Script([300], hang_after=True)], ids=["queued", "running"]
)
async def test_a_stop_answers_what_it_interrupts(model: ServedModel, script: Script, stream: bool) -> None:
    """With an error that says when to come back, before the first event as after it."""
    fake = FakeVerify()
    fake.script = script
    transport = httpx.AsyncHTTPTransport(verify=False)
    async with serve(fake) as port, httpx.AsyncClient(transport=transport) as http:
        config = GatewayConfig(port=0, verify=f"127.0.0.1:{port}", drain_timeout_s=0, keepalive_s=0.05)
        async with running_gateway(config, model) as url:
            body = {"messages": MESSAGES, "stream": stream}
            request = asyncio.create_task(http.post(f"{url}/v1/chat/completions", json=body))
            await fake.began.wait()
            await asyncio.sleep(0.2)
        reply = await request
        assert "the gateway is going down" in reply.text
        assert "[DONE]" not in reply.text
        assert stream or (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        assert reply.headers["x-request-id"]


async def seconds_to_the_end(url: str, *parts: bytes) -> tuple[float, bytes]:
    """When the gateway closes a connection on which these come, a tenth of a second between them, and what it said."""
    parts_of_url = httpx.URL(url)
    reader, writer = await asyncio.open_connection(parts_of_url.host, parts_of_url.port)
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def write() -> None:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.1)

    writing = asyncio.create_task(write())
    try:
        async with asyncio.timeout(5):
            said = await reader.read()
        return loop.time() - began, said
    finally:
        writing.cancel()
        writer.close()


async def test_half_open_connections_are_closed(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a head comes byte by byte; an answer that takes longer is no reason."""
    monkeypatch.setattr("gateway.http.connection.HEAD_S", 0.3)
    fake = FakeVerify()
    async with serve(fake) as port:
        config = GatewayConfig(port=0, verify=f"127.0.0.1:{port}", request_timeout_s=0.5)
        async with running_gateway(config, model) as url:
            assert 0.2 < (await seconds_to_the_end(url))[0] < 2
            assert 0.2 < (await seconds_to_the_end(url, *(bytes([byte]) for byte in HEAD)))[0] < 2
            health = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
            took, said = await seconds_to_the_end(url, health, *(bytes([byte]) for byte in HEAD))
            assert took < 2
            assert said.startswith(b"HTTP/1.1 200")
            took, said = await seconds_to_the_end(url, HEAD, *(b"{" for _ in range(20)))
            assert 0.4 < took < 3
            assert said.startswith(b"HTTP/1.1 408")
            assert b"request_timeout" in said
        fake.script = Script([300], hang_after=True)
        config = GatewayConfig(port=0, verify=f"127.0.0.1:{port}")
        transport = httpx.AsyncHTTPTransport(verify=False)
        async with running_gateway(config, model) as url, httpx.AsyncClient(transport=transport) as http:
            request = asyncio.create_task(http.post(f"{url}/v1/chat/completions", json={"messages": MESSAGES}))
            await asyncio.sleep(1)
            fake.released.set()
            assert (await request).status_code == 200

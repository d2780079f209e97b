"""`draftwood check` against real health services."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import NoReturn

import grpc.aio
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from draftwood.cli import main
from draftwood.cli.check import default_addresses, explain, problem
from draftwood.cli.stack.ports import free_port

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def server() -> AsyncIterator[tuple[str, health.aio.HealthServicer]]:
    checks = health.aio.HealthServicer()
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}", checks
    await server.stop(None)


async def test_a_grpc_service(server: tuple[str, health.aio.HealthServicer]) -> None:
    address, checks = server
    await checks.set("", SERVING)
    await checks.set("part", NOT_SERVING)
    assert await problem(address, "", 5.0) is None
    assert await problem(address, "part", 5.0) == "NOT_SERVING"
    assert await problem(address, "other", 5.0) == "no such service: other"


async def test_nothing_there() -> None:
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    expected = f"nothing listens at {address} (is it still starting?)"
    assert await problem(address, "", 5.0) == expected
    assert await problem(f"http://{address}", "", 5.0) == expected


async def test_no_answer() -> None:
    with socket.socket() as listener:  # the kernel connects, nobody reads
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert await problem(f"http://{address}", "", 0.3) == "no answer within 0.3 s"
        assert await problem(address, "", 0.3) is not None


async def test_a_gateway_asked_as_a_grpc_service() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await problem(address, "", 5.0) == f"this is no gRPC service; for a gateway say http://{address}"


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/", "/health"])
@pytest.mark.parametrize("status", [200, 503])
async def test_a_gateway(status: int, suffix: str) -> None:
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).split()[1])
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        trouble = await problem(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{suffix}", "", 5.0)
    assert asked == [b"/health"]
    assert (trouble is None) == (status == 200)


def test_one_line_and_an_exit_code() -> None:
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    result = CliRunner().invoke(main, ["check", address, "--timeout", "2"])
    assert result.exit_code == 1
    assert result.output.startswith(f"{address} not healthy: ")
    assert result.output.count("\n") == 1


def test_several_addresses_have_a_line_each() -> None:
    addresses = [f"127.0.0.1:{free_port('127.0.0.1')}", "http://127.0.0.1:1"]
    result = CliRunner().invoke(main, ["check", *addresses, "--timeout", "2"])
    assert result.exit_code == 1
    assert [line.split()[0] for line in result.output.splitlines()] == addresses


async def test_a_name_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without asking a name server: Python's resolver is stood in for, and gRPC's has said the words below."""

    def unknown(*_: object, **__: object) -> NoReturn:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert await problem("http://nosuch.invalid:8000", "", 5.0) == "the name nosuch.invalid is not known"
    words = (
        "errors resolving nosuch.invalid:50051: [field:hostname lookup error:"
        "address lookup failed for nosuch.invalid:50051: Domain name not found]"
    )
    assert explain("nosuch.invalid:50051", words) == "the name nosuch.invalid is not known"


async def test_a_port_that_is_none() -> None:
    assert await problem("127.0.0.1:bad", "", 5.0) == "127.0.0.1:bad is not host:port"


def test_default_addresses() -> None:
    assert default_addresses() == ["127.0.0.1:50061", "127.0.0.1:50051", "http://127.0.0.1:8000"]

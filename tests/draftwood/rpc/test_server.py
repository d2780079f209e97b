"""The server that both gRPC services are: its port, its health, its reflection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from draftwood.errors import ConfigError
from draftwood.rpc.conventions import open_channel
from draftwood.rpc.server import RpcServer
from draftwood.security.security import OPEN

SERVICE = "draftwood.v1.DraftService"


@pytest.fixture
async def server() -> AsyncIterator[RpcServer]:
    server = RpcServer(SERVICE, OPEN)
    yield server
    await server.stop(0)


async def test_a_port_that_is_taken_is_named(server: RpcServer) -> None:
    port = server.listen("127.0.0.1", 0)
    await server.start()
    other = RpcServer(SERVICE, OPEN)
    with pytest.raises(ConfigError, match=f"--port {port}: cannot listen on 127.0.0.1:{port}") as caught:
        other.listen("127.0.0.1", port)
    assert caught.value.field == "port"
    await other.stop(0)


async def test_health_is_what_is_set_until_the_end(server: RpcServer) -> None:
    port = server.listen("127.0.0.1", 0)
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)

        async def said() -> set[Any]:
            checks = [await stub.Check(health_pb2.HealthCheckRequest(service=name)) for name in ("", SERVICE)]
            return {check.status for check in checks}

        for is_serving in (False, True):
            await server.set_health(is_serving=is_serving)
            serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
            assert await said() == {serving if is_serving else not_serving}
        await server.begin_shutdown()
        await server.set_health(is_serving=True)
        assert await said() == {health_pb2.HealthCheckResponse.NOT_SERVING}


async def test_reflection_names_the_service_and_health(server: RpcServer) -> None:
    port = server.listen("127.0.0.1", 0)
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # pyright: ignore[reportArgumentType]
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in stub.ServerReflectionInfo(iter([question])):
            names = {service.name for service in answer.list_services_response.service}
            assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}

"""A message that is no protobuf of its method's type ends its call as bad input does, whatever kind the method is."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from draftwood.errors import InvalidRequestError
from draftwood.rpc.conventions import errors_to_status, from_rpc_error
from draftwood.security.security import OPEN
from draftwood.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc

GARBAGE = b"\xff\xff\xff\xff"


class Verify(verify_pb2_grpc.VerifyServiceServicer):
    async def GetLoad(self, request: Any, context: Any) -> Any:
        return verify_pb2.GetLoadResponse(steps=7)

    async def Generate(self, request: Any, context: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        await context.write(verify_pb2.GenerateResponse())


class Draft(draft_pb2_grpc.DraftServiceServicer):
    """Counts messages; both of its methods take many."""

    def __init__(self) -> None:
        self.seen = 0

    async def Draft(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request_iterator: AsyncIterator[Any], context: Any
    ) -> None:
        async with errors_to_status(context):
            async for request in request_iterator:
                self.seen += 1
                await context.write(draft_pb2.DraftResponse(step_id=request.step_id))

    async def Prefill(self, request_iterator: AsyncIterator[Any], context: Any) -> Any:
        async with errors_to_status(context):
            async for _ in request_iterator:
                self.seen += 1
        return draft_pb2.PrefillResponse()


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = OPEN.server()
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(Verify(), server)  # pyright: ignore[reportAbstractUsage]
    draft_pb2_grpc.add_DraftServiceServicer_to_server(Draft(), server)  # pyright: ignore[reportAbstractUsage]
    port = OPEN.listen(server, "127.0.0.1", 0)
    await server.start()
    async with OPEN.channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


async def answers(channel: grpc.aio.Channel, service: str, method: str, messages: list[bytes]) -> list[bytes]:
    """Calls a method with bytes."""
    path = f"/draftwood.v1.{service}/{method}"
    match method:
        case "GetLoad":
            return [await channel.unary_unary(path)(messages[0])]
        case "Generate":
            return [answer async for answer in channel.unary_stream(path)(messages[0])]
        case "Prefill":
            return [await channel.stream_unary(path)(iter(messages))]
        case _:
            return [answer async for answer in channel.stream_stream(path)(iter(messages))]


METHODS = [
    ("VerifyService", "GetLoad"),
    ("VerifyService", "Generate"),
    ("DraftService", "Prefill"),
    ("DraftService", "Draft"),
]


@pytest.mark.parametrize(("service", "method"), METHODS)
async def test_garbage_is_bad_input(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture, service: str, method: str
) -> None:
    caplog.set_level(logging.WARNING)
    for messages in ([GARBAGE], [b"", GARBAGE]) if service == "DraftService" else ([GARBAGE],):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answers(channel, service, method, messages)
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidRequestError)
        assert error.message == f"a message of /draftwood.v1.{service}/{method} cannot be decoded"
    assert not caplog.records
    assert len(await answers(channel, service, method, [b""])) == 1

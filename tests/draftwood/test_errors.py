"""Errors keep their kind, field and retry time across a real call; gRPC options are spelt as the library has them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio
import pytest

from draftwood.errors import LEAVES, DraftwoodError
from draftwood.rpc.conventions import CLIENT_OPTIONS, SERVER_OPTIONS, abort, from_rpc_error, open_channel


@pytest.fixture
async def failing_call() -> AsyncIterator[grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]]:
    """A method that fails with the error whose index it is sent."""

    async def fail(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        await abort(context, LEAVES[request[0]]("went wrong", field="some_field", retry_after_s=1.5))

    handler = grpc.unary_unary_rpc_method_handler(fail)  # pyright: ignore[reportArgumentType]
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"Fail": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield channel.unary_unary("/t.T/Fail")
    await server.stop(None)


@pytest.mark.parametrize("index", range(len(LEAVES)), ids=[leaf.__name__ for leaf in LEAVES])
async def test_errors_survive_the_wire(
    failing_call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes], index: int
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await failing_call(bytes([index]))
    error = from_rpc_error(caught.value)
    assert type(error) is LEAVES[index]
    assert (error.message, error.field, error.retry_after_s) == ("went wrong", "some_field", 1.5)


def test_leaves_have_one_status_each() -> None:
    assert len({leaf.reason for leaf in LEAVES}) == len(LEAVES)
    assert all(issubclass(leaf, DraftwoodError) and 400 <= leaf.http_status < 600 for leaf in LEAVES)


def test_channel_options_are_spelt_as_grpc_knows_them() -> None:
    known = {
        "grpc.max_receive_message_length",
        "grpc.max_send_message_length",
        "grpc.keepalive_time_ms",
        "grpc.keepalive_timeout_ms",
        "grpc.keepalive_permit_without_calls",
        "grpc.http2.max_pings_without_data",
        "grpc.http2.min_ping_interval_without_data_ms",
        "grpc.http2.max_ping_strikes",
        "grpc.so_reuseport",
        "grpc.enable_http_proxy",
        "grpc.initial_reconnect_backoff_ms",
        "grpc.min_reconnect_backoff_ms",
        "grpc.max_reconnect_backoff_ms",
    }
    assert {name for name, _ in [*SERVER_OPTIONS, *CLIENT_OPTIONS]} <= known

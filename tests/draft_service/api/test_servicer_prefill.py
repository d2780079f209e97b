"""Rows that come ahead of their sequence's steps, over real connections."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from draft_service.api.streams import MAX_LEASES, StreamRegistry
from draft_service.cache.closed_sequences import MAX_REMEMBERED, ClosedSequences
from draft_service.cache.context_cache import SequenceKey
from draftwood.errors import OverloadedError
from draftwood.rpc.conventions import from_rpc_error
from draftwood.v1 import draft_pb2
from tests.draft_service.served import Running, exchange, prefill, request, rows, sequence


async def test_prefill_before_and_after_the_draft_stream(running: Running) -> None:
    assert await prefill(running, rows(0, 8), rows(8, 16)) == 16
    call = running.stub.Draft()
    response = await exchange(call, request(sequence(20, rows(16, 20))))
    assert response.results[0].HasField("tree")
    assert await prefill(running, rows(0, 16), rows(16, 30), sequence_id=2) == 30
    await asyncio.sleep(0.4)  # longer than a lease: an open stream keeps its rows
    response = await exchange(call, request(sequence(20), sequence(30, sequence_id=2)))
    assert [result.WhichOneof("outcome") for result in response.results] == ["tree", "tree"]


async def test_rows_of_a_stream_that_never_opens_are_freed(running: Running) -> None:
    await prefill(running, rows(0, 8))
    assert running.drafter.cache.num_free == 5
    await running.until_free(6)


async def test_prefill_refuses_with_a_status(running: Running) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await prefill(running, rows(0, 8), rows(9, 12))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "the cache holds 8" in (caught.value.details() or "")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await prefill(running, draft_pb2.ContextRows(start=96, **_one_row()))
    assert caught.value.code() == grpc.StatusCode.OUT_OF_RANGE
    for i in range(2, 7):
        await prefill(running, rows(0, 2), sequence_id=i)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await prefill(running, rows(0, 2), sequence_id=7)
    error = from_rpc_error(caught.value)
    assert isinstance(error, OverloadedError)
    assert error.retry_after_s == 1.0


def _one_row() -> dict[str, Any]:
    return {"features": bytes(192), "format": draft_pb2.FEATURE_FORMAT_FLOAT32}


async def test_refused_rows_hold_nothing_for_a_stream_to_come(running: Running) -> None:
    for stream_id in range(100, 120):
        with pytest.raises(grpc.aio.AioRpcError):
            await prefill(running, draft_pb2.ContextRows(start=5, **_one_row()), stream_id=stream_id)
    assert await prefill(running, rows(0, 2), stream_id=200) == 2


async def test_streams_that_are_not_open_are_few() -> None:
    registry = StreamRegistry(lambda _: None)
    assert all(registry.expect(i) for i in range(MAX_LEASES))
    assert not registry.expect(0)
    with pytest.raises(OverloadedError, match=f"stream_id is {MAX_LEASES}"):
        registry.expect(MAX_LEASES)
    registry.give_up(0)
    assert registry.expect(MAX_LEASES)
    registry.close()


def chunk(context: draft_pb2.ContextRows, **values: Any) -> draft_pb2.PrefillRequest:
    given: dict[str, Any] = {"stream_id": 77, "sequence_id": 1, "epoch": 1} | values
    return draft_pb2.PrefillRequest(context=context, **given)


async def test_rows_that_come_after_the_close_do_not_open_the_sequence_again(running: Running) -> None:
    call, under_way = running.stub.Draft(), running.stub.Prefill()
    await under_way.write(chunk(rows(0, 8)))
    await running.until_free(5)
    await exchange(call, request(closed_sequence_ids=[1, 2]))
    assert running.drafter.cache.num_free == 6
    await under_way.write(chunk(rows(8, 16)))
    await under_way.done_writing()
    assert (await under_way).num_rows == 16
    assert await prefill(running, rows(0, 8)) == 8  # a call that the close overtook as a whole
    assert await prefill(running, rows(0, 8), sequence_id=2) == 8  # and one of a sequence that was not known yet
    assert running.drafter.cache.num_free == 6


async def test_a_closed_id_may_be_used_again(running: Running) -> None:
    """By a step of its own stream, and by rows of a later epoch than the closed one."""
    call = running.stub.Draft()
    await exchange(call, request(sequence(5, rows(0, 5)), sequence(5, rows(0, 5), sequence_id=2)))
    await exchange(call, request(closed_sequence_ids=[1, 2]))
    response = await exchange(call, request(sequence(5, rows(0, 5))))
    assert response.results[0].HasField("tree")
    await prefill(running, rows(5, 12))
    await prefill(running, rows(0, 9), sequence_id=2, epoch=2)
    response = await exchange(call, request(sequence(12), sequence(9, sequence_id=2, epoch=2)))
    assert [result.WhichOneof("outcome") for result in response.results] == ["tree", "tree"]


async def test_ids_of_other_streams_and_of_ended_ones_stay_usable(running: Running) -> None:
    other, call = running.stub.Draft(), running.stub.Draft()
    await exchange(other, request(stream_id=99))
    await exchange(call, request(closed_sequence_ids=[1]))
    await prefill(running, rows(0, 8), stream_id=99)
    assert running.drafter.cache.num_free == 5
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    call = running.stub.Draft()
    await exchange(call, request())
    await prefill(running, rows(0, 8))
    response = await exchange(call, request(sequence(8)))
    assert response.results[0].HasField("tree")


def test_so_many_closed_sequences_are_remembered() -> None:
    closed = ClosedSequences()
    for i in range(MAX_REMEMBERED + 1):
        closed.add(SequenceKey(1, i))
        closed.add(SequenceKey(1, 1))  # once more does no harm, and makes it the latest
    over = [i for i in range(MAX_REMEMBERED + 2) if closed.is_over(SequenceKey(1, i), 1)]
    assert over == list(range(1, MAX_REMEMBERED + 1))

"""The service over real connections, in this process and as one of its own."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draft_service.server import SERVICE, DraftServer
from draftwood import __version__
from draftwood.checkpoint import EMBEDDED_DRAFT, EMBEDDED_TARGET, projection_checksum, tokenizer_hash
from draftwood.errors import InvalidRequestError
from draftwood.noise import NOISE_VERSION
from draftwood.rpc.conventions import from_rpc_error, open_channel
from draftwood.rpc.wire import PROTOCOL_VERSION, tree_from_wire
from draftwood.v1 import draft_pb2, draft_pb2_grpc, sampling_pb2, tree_pb2
from tests.draft_service.conftest import MakeDrafter
from tests.draft_service.served import FLOAT32, Running, exchange, options, request, rows, sequence, service_of


async def test_handshake_and_health(running: Running) -> None:
    response = await running.stub.GetDraftModel(draft_pb2.GetDraftModelRequest())
    model = response.model
    assert (model.model_id, response.incarnation, response.version) == ("tiny", 5, __version__)
    assert (model.block_size, model.max_depth, model.hidden_size, model.vocab_size) == (7, 6, 48, 131)
    assert (model.max_context, model.tokenizer_hash, model.projection_checksum) == (96, "aa", "bb")
    health: Any = health_pb2_grpc.HealthStub(running.channel)
    for name in ("", SERVICE):
        status = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert status.status == health_pb2.HealthCheckResponse.SERVING


async def test_steps_are_answered_in_order(running: Running) -> None:
    call = running.stub.Draft()
    first = await exchange(call, request(sequence(10, rows(0, 10)), step_id=41))
    assert first.step_id == 41
    (result,) = first.results
    assert (result.sequence_id, result.epoch, result.base_length, result.root_token_id) == (1, 1, 10, 17)
    assert first.busy_us >= first.draft_us > 0
    assert first.tree_us > 0
    limits = {"vocab_size": 131, "tree_budget": 9, "max_depth": 6}
    drafted = tree_from_wire(result.tree, 17, **limits)
    assert drafted.num_nodes == 10
    for number in (2, 3, 4):  # written ahead, answered in order; the third only brings context
        asks = {"tree": options(num_candidates=3)} if number != 3 else {"tree": None}
        await call.write(request(sequence(10 + number, rows(0, 10 + number), **asks), step_id=number))
    answers = [await call.read() for _ in range(3)]
    assert [answer.step_id for answer in answers] == [2, 3, 4]
    assert [len(answer.results) for answer in answers] == [1, 0, 1]
    found = answers[0].results[0].candidates
    assert (found.num_depths, found.width) == (6, 3)
    assert len(np.frombuffer(found.token_ids, "<i4")) == len(np.frombuffer(found.log_probs, "<f4")) == 18
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    await running.until_free(6)


async def test_bfloat16_rows(running: Running) -> None:
    call = running.stub.Draft()
    response = await exchange(call, request(sequence(10, rows(0, 10, "bf"))))
    assert response.results[0].HasField("tree")


async def end_by_cancel(call: Any) -> None:
    call.cancel()


async def end_by_error(call: Any) -> None:
    await call.write(request(stream_id=78))


async def end_by_closing(call: Any) -> None:
    await call.done_writing()


@pytest.mark.parametrize("end", [end_by_cancel, end_by_error, end_by_closing])
async def test_the_end_of_a_stream_frees_its_sequences(running: Running, end: Callable[[Any], Awaitable[None]]) -> None:
    other = running.stub.Draft()
    await exchange(other, request(sequence(5, rows(0, 5)), stream_id=99))
    call = running.stub.Draft()
    await exchange(call, request(sequence(5, rows(0, 5)), sequence(5, rows(0, 5), sequence_id=2)))
    assert running.drafter.cache.num_free == 3
    await exchange(call, request(closed_sequence_ids=[2]))
    assert running.drafter.cache.num_free == 4
    await end(call)
    await running.until_free(5)
    response = await exchange(other, request(sequence(5), stream_id=99))
    assert response.results[0].HasField("tree")


async def test_a_lost_connection_frees_its_sequences(running: Running) -> None:
    async with open_channel(f"127.0.0.1:{running.server.port}") as channel:
        call = draft_pb2_grpc.DraftServiceStub(channel).Draft()
        await exchange(call, request(sequence(5, rows(0, 5))))
        assert running.drafter.cache.num_free == 5
    await running.until_free(6)


@pytest.mark.parametrize(
    ("wrong", "reason", "named"),
    [
        ({"root_token_id": 131}, "INVALID", "root_token_id is 131"),
        ({"epoch": 0}, "INVALID", "epoch is 0"),
        ({"tree": options(tree_budget=256)}, "INVALID", "tree_budget is 256"),
        ({"tree": options(tree_budget=0)}, "INVALID", "tree_budget is 0"),
        ({"tree": options(width_cap=65)}, "INVALID", "width_cap is 65"),
        ({"tree": options(algorithm=tree_pb2.ALGORITHM_NONE)}, "INVALID", "algorithm is none"),
        ({"tree": options(algorithm=9)}, "UNSUPPORTED", "algorithm is 9"),
        ({"sampling": sampling_pb2.SamplingParams(temperature=-1.0)}, "INVALID", "temperature is -1"),
        ({"sampling": sampling_pb2.SamplingParams(temperature=float("nan"))}, "INVALID", "temperature is nan"),
        ({"context": draft_pb2.ContextRows(features=b"12", format=FLOAT32)}, "INVALID", "hold 2 bytes"),
        ({"context": draft_pb2.ContextRows(features=bytes(288), format=FLOAT32)}, "INVALID", "a row's 192"),
        ({"context": draft_pb2.ContextRows()}, "INVALID", "format is 0"),
        ({"context": draft_pb2.ContextRows(features=b"\xff" * 192, format=FLOAT32)}, "INVALID", "finite"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_malformed_sequence_is_refused_alone(
    running: Running, wrong: dict[str, Any], reason: str, named: str
) -> None:
    call = running.stub.Draft()
    message = request(
        sequence(5, rows(0, 5)), sequence(0, **({"sequence_id": 2} | wrong)), sequence(7, rows(0, 7), sequence_id=3)
    )
    response = await exchange(call, message)
    assert [result.WhichOneof("outcome") for result in response.results] == ["tree", "refusal", "tree"]
    refusal = response.results[1].refusal
    assert draft_pb2.RefusalReason.Name(refusal.reason) == f"REFUSAL_REASON_{reason}"
    assert named in refusal.message


async def test_gaps_on_the_wire(running: Running) -> None:
    call = running.stub.Draft()
    await exchange(call, request(sequence(5, rows(0, 5))))
    response = await exchange(call, request(sequence(20, rows(9, 20))))
    refusal = response.results[0].refusal
    assert refusal.reason == draft_pb2.REFUSAL_REASON_CONTEXT_INCOMPLETE
    assert refusal.context_length == 5


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([request(sequence(0), sequence(0))], "sequence_id 1 comes twice"),
        ([request(), request(stream_id=78)], "stream_id is 78"),
        ([request(stream_id=99)], "already open"),
    ],
    ids=["twice", "changed", "taken"],
)
async def test_malformed_messages_end_the_stream(
    running: Running, messages: list[draft_pb2.DraftRequest], named: str
) -> None:
    other = running.stub.Draft()
    await exchange(other, request(stream_id=99))
    call = running.stub.Draft()
    for message in messages:
        await call.write(message)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [answer async for answer in call]
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidRequestError)
    assert named in error.message
    assert (await exchange(other, request(stream_id=99, step_id=8))).step_id == 8


async def test_deadlines(running: Running) -> None:
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold() -> None:
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result()

    call = running.stub.Draft()
    running.worker.submit(hold)
    await call.write(request(sequence(5, rows(0, 5)), deadline_us=20_000))
    await asyncio.sleep(0.1)
    release.set()
    response = await call.read()
    assert response.results[0].refusal.reason == draft_pb2.REFUSAL_REASON_DEADLINE
    assert response.busy_us >= 20_000
    response = await exchange(call, request(sequence(5), deadline_us=60_000_000))
    assert response.results[0].HasField("tree")


async def test_stop_says_so(make_drafter: MakeDrafter) -> None:
    drafter, _, _ = make_drafter()
    server = await DraftServer(service_of(drafter)).start("127.0.0.1", 0)
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        call = draft_pb2_grpc.DraftServiceStub(channel).Draft()
        await exchange(call, request(sequence(5, rows(0, 5))))
        health: Any = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        stopping = asyncio.create_task(server.stop(0.5))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await stopping
    assert drafter.cache.num_free == 6


async def test_process() -> None:
    """The embedded drafter as a process of its own: readiness line, handshake, a step, a clean stop."""
    command = [
        sys.executable,
        "-m",
        "draft_service",
        "--port",
        "0",
        "--no-compile",
        "--threads",
        "1",
        "--dtype",
        "float32",
    ]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        assert line.startswith("draft service ready on 127.0.0.1:")
        assert line.endswith(" (sprout-DFlash-b16, float32, 1 threads)\n")
        async with open_channel(line.split()[4]) as channel:
            stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
            model = (await stub.GetDraftModel(draft_pb2.GetDraftModelRequest())).model
            assert (model.block_size, model.max_depth, model.vocab_size, model.hidden_size) == (16, 15, 8192, 384)
            assert list(model.target_layer_ids) == [1, 4, 6]
            assert (model.context_window, model.max_context) == (0, 2048)
            assert (model.protocol_version, model.noise_version) == (PROTOCOL_VERSION, NOISE_VERSION)
            assert model.tokenizer_hash == tokenizer_hash(EMBEDDED_TARGET)
            assert model.projection_checksum == projection_checksum(EMBEDDED_DRAFT)
            call = stub.Draft()
            context = draft_pb2.ContextRows(features=bytes(2 * 384 * 2), format=draft_pb2.FEATURE_FORMAT_BFLOAT16)
            response = await exchange(call, request(sequence(2, context)))
            assert len(response.results[0].tree.token_ids) == 36
            process.send_signal(signal.SIGTERM)
            output, errors = await asyncio.wait_for(process.communicate(), 20)
        assert (process.returncode, output, errors) == (0, b"", b"")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--draft", "none"], "--draft is 'none'"),
        (["--draft", "./nowhere"], "--draft ./nowhere: no such directory"),
        (["--target", "./nowhere"], "--target ./nowhere: no such directory"),
        (["--block-size", "32", "--no-compile"], "--block-size is 32, not in [2, 16]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_settings(args: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    from draft_service.server import main

    assert main([*args, "--port", "0"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert named in output.err

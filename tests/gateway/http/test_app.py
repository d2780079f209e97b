"""The gateway as a service: models, health, headers, hang-ups, failures in mid-stream, start and stop."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2

from draftwood.config import GatewayConfig
from draftwood.errors import InternalError
from gateway.api.served_model import ServedModel
from gateway.text.tokenizer import Tokenizer
from tests.gateway.conftest import Stand, stand_for
from tests.gateway.fake_verify import FakeVerify, Script, serve

pytestmark = pytest.mark.asyncio(loop_scope="session")

ROOT = Path(__file__).parents[3]
MESSAGES: Any = [{"role": "user", "content": "Say something."}]


async def test_models(stand: Stand) -> None:
    models = [entry async for entry in stand.openai.models.list()]
    assert [(entry.id, entry.object, entry.owned_by) for entry in models] == [("sprout", "model", "draftwood")]
    assert (await stand.openai.models.retrieve("sprout")).id == "sprout"
    with pytest.raises(openai.NotFoundError):
        await stand.openai.models.retrieve("other/name")


async def test_health_and_version(stand: Stand) -> None:
    reply = await stand.http.get("/health")
    assert (reply.status_code, reply.json()["status"]) == (200, "ok")
    assert reply.json()["drafter"] == {"status": "ready", "model": "sprout-DFlash-b16"}
    await stand.verify.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert (await stand.http.get("/health")).status_code == 503
    assert (await stand.http.get("/version")).json()["verify"] == "0.0.test"


async def test_the_verify_service_comes_later(model: ServedModel) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    fake = FakeVerify()
    async with stand_for(GatewayConfig(port=0, verify=f"127.0.0.1:{port}"), model, fake) as stand:
        assert (await stand.http.get("/health")).status_code == 503
        assert [entry.id async for entry in stand.openai.models.list()] == ["sprout"]
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as caught:
                await stand.openai.chat.completions.create(model="sprout", messages=MESSAGES, stream=stream)
            assert (caught.value.status_code, caught.value.code) == (503, "unavailable")
            assert caught.value.response.headers["retry-after"] == "1"
        async with serve(fake, port), asyncio.timeout(10):
            while (await stand.http.get("/health")).status_code != 200:
                pass
            assert (await stand.openai.chat.completions.create(model="sprout", messages=MESSAGES)).id


async def test_another_tokenizer_is_refused(stand: Stand) -> None:
    stand.verify.tokenizer_hash = "f00"
    await stand.http.get("/health")
    reply = await stand.http.post("/v1/chat/completions", json={"messages": MESSAGES})
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "model_mismatch")
    assert "f00" in (await stand.http.get("/health")).json()["reason"]


async def test_request_ids(stand: Stand) -> None:
    reply = await stand.http.get("/v1/models", headers={"X-Request-Id": "abc-1"})
    assert reply.headers["x-request-id"] == "abc-1"
    for bad in ("", "x" * 200, "a b"):
        reply = await stand.http.get("/v1/models", headers={"X-Request-Id": bad})
        assert re.fullmatch("[0-9a-f]{32}", reply.headers["x-request-id"])


async def test_clients_are_told_apart(stand: Stand) -> None:
    """By API key and user; without a user by key and address. Neither travels in the clear."""
    keys: list[str] = []
    for key, fields in (
        ("one", {}), ("one", {"user": "ann"}), ("one", {"safety_identifier": "bob"}), ("two", {"user": "ann"}),
        ("one", {"user": "ann"}), ("one", {"user": 5}),
    ):  # fmt: skip
        body = {"messages": MESSAGES, "max_tokens": 1} | fields
        headers = {"authorization": f"Bearer {key}"}
        assert (await stand.http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
        keys.append(stand.verify.requests[-1].client)
    assert len(set(keys[:4])) == 4
    assert keys[4] == keys[1]
    assert keys[5] == keys[0]
    assert not any(word in key for key in keys for word in ("one", "two", "ann", "bob", "127.0.0.1"))


async def test_cors(stand: Stand) -> None:
    headers = {
        "Origin": "http://a.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    reply = await stand.http.options("/v1/chat/completions", headers=headers)
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, "*")
    reply = await stand.http.get("/v1/models", headers={"Origin": "http://a.example"})
    assert reply.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(
    "script", [Script(hang_at_start=True), Script([300], hang_after=True)], ids=["queued", "running"]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_hang_up(stand: Stand, script: Script, stream: bool) -> None:
    """Field bug 9: queued or running, streamed or not."""
    stand.verify.script = script
    body = {"messages": MESSAGES, "stream": stream, "max_tokens": 2000, "n": 2}
    request = asyncio.create_task(stand.http.post("/v1/chat/completions", json=body))
    await stand.verify.began.wait()
    request.cancel()
    async with asyncio.timeout(1):
        await stand.verify.cancelled.wait()
        await stand.verify.idle.wait()


async def test_hang_up_in_mid_stream(stand: Stand) -> None:
    stand.verify.script = Script([300] * 5, hang_after=True)
    stream = await stand.openai.chat.completions.create(model="sprout", messages=MESSAGES, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    async with asyncio.timeout(1):
        await stand.verify.cancelled.wait()


async def test_error_in_mid_stream(stand: Stand) -> None:
    stand.verify.script = Script([300, 301], error_after=InternalError("the device is gone"), is_obedient=False)
    reply = await stand.http.post("/v1/chat/completions", json={"messages": MESSAGES, "stream": True})
    frames = [line for line in reply.text.split("\n\n") if line.startswith("data: ")]
    assert reply.status_code == 200
    assert json.loads(frames[-1][6:])["error"]["message"] == "the device is gone"
    assert "[DONE]" not in reply.text
    stream = await stand.openai.chat.completions.create(model="sprout", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="the device is gone"):
        async for _ in stream:
            pass
    whole = await stand.http.post("/v1/chat/completions", json={"messages": MESSAGES})
    assert (whole.status_code, whole.json()["error"]["type"]) == (500, "server_error")


@pytest.mark.parametrize(
    "script", [Script(hang_at_start=True), Script([300], hang_after=True)], ids=["queued", "running"]
)
async def test_comment_lines_in_silence(model: ServedModel, script: Script) -> None:
    """Also while queued: the stream opens then, although nothing is known yet."""
    fake = FakeVerify()
    fake.script = script
    async with serve(fake) as port:
        config = GatewayConfig(port=0, verify=f"127.0.0.1:{port}", keepalive_s=0.05)
        async with stand_for(config, model, fake) as stand:
            body = {"messages": MESSAGES, "stream": True}
            async with stand.http.stream("POST", "/v1/chat/completions", json=body) as reply:
                lines = reply.aiter_lines()
                while not (await anext(lines)).startswith(":"):
                    pass
                fake.released.set()
                assert [line async for line in lines if line][-1] == "data: [DONE]"


async def test_a_request_out_of_time(model: ServedModel) -> None:
    fake = FakeVerify()
    fake.script = Script(hang_at_start=True)
    async with serve(fake) as port:
        config = GatewayConfig(port=0, verify=f"127.0.0.1:{port}", request_timeout_s=0.1)
        async with stand_for(config, model, fake) as stand:
            for stream in (False, True):
                reply = await stand.http.post("/v1/chat/completions", json={"messages": MESSAGES, "stream": stream})
                assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_a_fault_of_ours_is_an_error_object(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(ServedModel, "fingerprint", fail)
    reply = await stand.http.post("/v1/chat/completions", json={"messages": MESSAGES})
    assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")
    assert "secret" not in reply.text


async def test_served_model_name_and_sampling_defaults(model: ServedModel) -> None:
    fake = FakeVerify()
    renamed = replace(model, name="my/model", defaults=replace(model.defaults, temperature=0.6, top_p=0.5, top_k=20))
    async with (
        serve(fake) as port,
        stand_for(GatewayConfig(port=0, verify=f"127.0.0.1:{port}"), renamed, fake) as stand,
    ):
        assert (await stand.openai.models.retrieve("my/model")).id == "my/model"
        await stand.openai.chat.completions.create(model="my/model", messages=MESSAGES)
        await stand.openai.chat.completions.create(model="my/model", messages=MESSAGES, temperature=0, top_p=1)
    samplings = [request.sampling for request in fake.requests]
    assert samplings[0].temperature == pytest.approx(0.6)
    assert (samplings[0].top_p, samplings[0].top_k) == (0.5, 20)
    assert (samplings[1].temperature, samplings[1].HasField("top_p")) == (0, False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_process_lets_answers_end_and_stops(number: signal.Signals, tokenizer: Tokenizer) -> None:
    fake = FakeVerify()
    fake.script = Script(tokenizer.encode("Hello"), chunk_sizes=(9,), hang_after=True)
    async with serve(fake) as port:
        command = [sys.executable, "-m", "gateway", "--port", "0", "--verify", f"127.0.0.1:{port}"]
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode().strip()
        found = re.fullmatch(r"gateway ready on (http://127\.0\.0\.1:\d+/v1) \(model sprout\)", line)
        assert found is not None, line
        transport = httpx.AsyncHTTPTransport(verify=False)
        async with httpx.AsyncClient(transport=transport, base_url=found[1]) as http:
            body = {"messages": MESSAGES, "stream": True}
            async with http.stream("POST", "/chat/completions", json=body) as reply:
                lines = reply.aiter_lines()
                while "Hello" not in await anext(lines):
                    pass
                process.send_signal(number)
                async with asyncio.timeout(10):
                    while await listens(found[1]):
                        pass
                fake.released.set()
                assert [line async for line in lines if line][-1] == "data: [DONE]"
        assert await process.wait() == 0


async def listens(url: str) -> bool:
    """Whether a new connection is accepted."""
    parts = httpx.URL(url)
    try:
        _, writer = await asyncio.open_connection(parts.host, parts.port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


async def test_a_taken_port_is_named(model: ServedModel) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        command = [sys.executable, "-m", "gateway", "--port", str(held.getsockname()[1])]
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
        _, errors = await process.communicate()
    assert process.returncode == 2
    assert b"--port" in errors

"""Requests that are large in number: they leave the event loop, and more choices than fit at once are served."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from gateway.api.schemas import ChatRequest, parse
from gateway.http import request_body
from gateway.text.chat_template import ChatTemplate
from tests.gateway.conftest import Stand
from tests.gateway.fake_verify import EOS, MAX_BATCH, MAX_CONTEXT, Script

pytestmark = pytest.mark.asyncio(loop_scope="session")


def spied(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """The threads that call a function."""
    inner, threads = getattr(owner, name), list[int]()

    def spy(*args: Any, **options: Any) -> Any:
        threads.append(threading.get_ident())
        return inner(*args, **options)

    monkeypatch.setattr(owner, name, spy)
    return threads


@pytest.mark.parametrize(
    "fields",
    [{"messages": [{"role": "user", "content": ""}] * 1000}, {"chat_template_kwargs": {"a": [0] * 1000}}],
    ids=["messages", "chat_template_kwargs"],
)
async def test_many_entries_leave_the_event_loop(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    threads = spied(monkeypatch, ChatTemplate, "render")
    body = {"messages": [{"role": "user", "content": "a"}]} | fields
    await stand.http.post("/v1/chat/completions", json=body)
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


async def test_a_large_body_leaves_the_event_loop(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = spied(monkeypatch, request_body, "decode")
    body = json.dumps({"messages": [{"role": "user", "content": ""}] * 20_000})
    reply = await stand.http.post("/v1/chat/completions", content=body)
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "messages has 20000 entries, more than 4096")
    assert threads[0] != threading.get_ident()


async def test_a_large_body_nested_too_deeply(stand: Stand) -> None:
    reply = await stand.http.post("/v1/chat/completions", content=b"[" * 900_000)
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "the body is nested too deeply")


@pytest.mark.parametrize(("nest", "field"), [(False, "prompt"), (True, "prompt[0]")])
async def test_ids_are_counted_before_they_are_read(stand: Stand, nest: bool, field: str) -> None:
    ids: Any = [0] * MAX_CONTEXT + [-1]
    reply = await stand.http.post("/v1/completions", json={"prompt": [ids] if nest else ids})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", field)


@pytest.mark.parametrize("stream", [False, True])
async def test_more_choices_than_are_decoded_at_once(stand: Stand, stream: bool) -> None:
    stand.verify.script = Script([300, 301, EOS], hang_at_start=True)
    body = {"prompt": [[300]] * 20, "n": 8, "stream": stream}
    call = asyncio.create_task(stand.http.post("/v1/completions", json=body))
    await stand.verify.began.wait()
    await asyncio.sleep(0.2)  # for more calls to come, which must not
    stand.verify.released.set()
    reply = await call
    assert reply.status_code == 200
    assert len(stand.verify.requests) == 160
    assert stand.verify.most_running == MAX_BATCH
    if not stream:
        assert [choice["index"] for choice in reply.json()["choices"]] == list(range(160))


async def test_as_many_messages_as_may_be() -> None:
    assert len(parse(ChatRequest, {"messages": [{"role": "user", "content": ""}] * 4096}).messages) == 4096

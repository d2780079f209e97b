"""A gateway of few words: answers each question with the same pieces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

FIGURES: dict[str, Any] = {
    "seed": 7,
    "steps": 10,
    "tokens_per_step": 4.0,
    "drafted": 70,
    "accepted": 30,
    "fallback_steps": 0,
    "stage_ms": {"draft": 20.0, "tree": 1.0, "verify": 60.0, "accept": 2.0, "commit": 5.0},
    "transport_p50_ms": 0.3,
    "decode_ms": 100.0,
}
PLAIN = FIGURES | {"steps": 40, "tokens_per_step": 1.0, "drafted": 0, "accepted": 0, "decode_ms": 200.0}

Answerer = Callable[[dict[str, Any]], list[str]]  # request body to lines of the event stream


def event(**fields: Any) -> str:
    """A line of the stream."""
    return f"data: {json.dumps(fields)}"


def answer(body: dict[str, Any]) -> list[str]:
    """The usual answer."""
    figures = PLAIN if body.get("algorithm") == "none" else FIGURES
    return [
        event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]),
        ": keep-alive",
        event(choices=[{"index": 0, "delta": {"content": "It is [b]good"}, "finish_reason": None}]),
        event(choices=[{"index": 0, "delta": {"content": " for you :smile:"}, "finish_reason": None}]),
        event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]),
        event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 41}, draftwood=figures),
        "data: [DONE]",
    ]


@asynccontextmanager
async def fake_gateway(answerer: Answerer = answer) -> AsyncGenerator[tuple[str, list[dict[str, Any]]]]:
    """Its address and the bodies that it was sent."""
    bodies: list[dict[str, Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET /v1/models "):
            status, content = 200, json.dumps({"data": [{"id": "sprout"}]})
        else:
            fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
            bodies.append(json.loads(await reader.readexactly(int(fields["content-length"]))))
            lines = answerer(bodies[-1])
            status = 400 if lines[0].startswith("{") else 200
            content = "\n\n".join(lines) + "\n\n"
        writer.write(f"HTTP/1.1 {status} X\r\nConnection: close\r\n\r\n{content}".encode())
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", bodies

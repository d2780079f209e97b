"""Server-sent events, and work that ends when its client hangs up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from draftwood.errors import DraftwoodError, InternalError
from gateway.api.error_object import error_response, from_error
from gateway.http.interruption import going_down

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n\n"

T = TypeVar("T")


def frame(value: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def hang_up(receive: Receive) -> None:
    """Returns when the client is gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancelled(task: asyncio.Future[Any]) -> None:
    """Cancels a task and waits until it is done with its clean-up."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def unless_hung_up(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The work's result; None if the client hangs up first, the work cancelled."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(hang_up(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await cancelled(gone)
        await cancelled(task)


class EventStream(Response):
    """A stream of JSON events and `[DONE]`.

    The status waits for the first event, at most as long as the stream may be silent: an error before that is an
    ordinary error response, a later one an event, without `[DONE]` behind it. When the client hangs up, the events are
    closed at once.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[dict[str, Any]], keepalive_s: float) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._keepalive_s = keepalive_s
        self._is_open = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events as they come."""
        gone = asyncio.ensure_future(hang_up(receive))
        try:
            while (event := await self._next(gone, send)) is not None:
                await self._send(send, frame(event))
            if not gone.done():
                await self._send(send, DONE, is_last=True)
        except DraftwoodError as error:
            await self._send_error(error, scope, receive, send)
        except asyncio.CancelledError:  # by a stop
            await self._send_error(going_down(), scope, receive, send)
        except Exception:
            await self._send_error(InternalError("internal error"), scope, receive, send)
            raise
        finally:
            await cancelled(gone)
            await self._events.aclose()

    async def _next(self, gone: asyncio.Future[None], send: Send) -> dict[str, Any] | None:
        """The next event; None at the end or when the client is gone. Comment lines are sent while it waits."""
        task = asyncio.ensure_future(anext(self._events, None))
        try:
            while True:
                await asyncio.wait((task, gone), timeout=self._keepalive_s or None, return_when=asyncio.FIRST_COMPLETED)
                if task.done():
                    return task.result()
                if gone.done():
                    return None
                await self._send(send, KEEPALIVE)
        finally:
            await cancelled(task)

    async def _send(self, send: Send, data: bytes, *, is_last: bool = False) -> None:
        if not self._is_open:
            self._is_open = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def _send_error(self, error: DraftwoodError, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_open:
            await self._send(send, frame(from_error(error)), is_last=True)
        else:
            await error_response(error)(scope, receive, send)

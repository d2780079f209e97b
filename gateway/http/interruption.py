"""Requests that a stop of the gateway interrupts: they are told so, and not just cut off."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwood.errors import UnavailableError
from gateway.api.error_object import DEFAULT_RETRY_AFTER_S, error_response


def going_down() -> UnavailableError:
    """What they are told."""
    return UnavailableError("the gateway is going down", retry_after_s=DEFAULT_RETRY_AFTER_S)


class InterruptionMiddleware:
    """Nothing but a stop whose time is up cancels a request. Answers that have begun end themselves (sse.py)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        is_open = False

        async def watched_send(message: Message) -> None:
            nonlocal is_open
            is_open = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except asyncio.CancelledError:
            if scope["type"] != "http" or is_open:
                raise
            await error_response(going_down())(scope, receive, send)

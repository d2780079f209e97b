"""One HTTP connection: uvicorn's on h11, which bounds heads, and closed where the head of a request does not come."""

from __future__ import annotations

import asyncio
from typing import cast

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

HEAD_S = 30.0  # from a connection's beginning, or a head's first byte, to its last


class Connection(H11Protocol):
    """Whoever opens connections and says nothing, or one byte a minute, does not keep them: uvicorn's own limit is for
    the silence behind an answer alone."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first head is waited for."""
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_S, transport.close)

    def data_received(self, data: bytes) -> None:
        """A request that is being served stops the clock; more of a head, or what follows an answer, does not."""
        super().data_received(data)
        cycle = cast("RequestResponseCycle | None", self.cycle)  # there is none before the first request
        if cycle is not None and not cycle.response_complete:
            self._stop_clock()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._stop_clock()
        super().connection_lost(exc)

    def _stop_clock(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

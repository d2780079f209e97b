"""Which Draft streams are open, and how long rows may wait for one that is not open yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from draftwood.errors import InvalidRequestError, OverloadedError

MAX_LEASES = 16


class StreamRegistry:
    """Open streams own their sequences. A Prefill that comes before its Draft stream gets a lease: if the stream has
    not opened when it runs out, `free` is called for the stream's sequences. Used on the event loop only."""

    def __init__(self, free: Callable[[int], None], lease_s: float = 60.0) -> None:
        self._free, self._lease_s = free, lease_s
        self._open: set[int] = set()
        self._leases: dict[int, asyncio.TimerHandle] = {}

    @property
    def num_open(self) -> int:
        """Streams that are open."""
        return len(self._open)

    def open(self, stream_id: int) -> None:
        """A Draft stream began."""
        if stream_id in self._open:
            raise InvalidRequestError(f"stream_id {stream_id} names a stream that is already open", field="stream_id")
        self._drop_lease(stream_id)
        self._open.add(stream_id)

    def end(self, stream_id: int) -> None:
        """A Draft stream ended, however: its sequences are freed."""
        self._open.discard(stream_id)
        self._free(stream_id)

    def expect(self, stream_id: int) -> bool:
        """Rows arrived for a stream: a lease, or a longer one, unless it is open. Returns whether it is a new one."""
        if stream_id in self._open:
            return False
        if stream_id not in self._leases and len(self._leases) >= MAX_LEASES:
            raise OverloadedError(
                f"stream_id is {stream_id}, but {MAX_LEASES} streams that are not open yet have rows here already",
                field="stream_id",
                retry_after_s=self._lease_s,
            )
        is_new = stream_id not in self._leases
        self._drop_lease(stream_id)
        loop = asyncio.get_running_loop()
        self._leases[stream_id] = loop.call_later(self._lease_s, self._expire, stream_id)
        return is_new

    def give_up(self, stream_id: int) -> None:
        """The rows that a lease was for were refused."""
        if stream_id in self._leases:
            self._drop_lease(stream_id)
            self._free(stream_id)

    def close(self) -> None:
        """Stops all timers."""
        for stream_id in list(self._leases):
            self._drop_lease(stream_id)

    def _drop_lease(self, stream_id: int) -> None:
        timer = self._leases.pop(stream_id, None)
        if timer is not None:
            timer.cancel()

    def _expire(self, stream_id: int) -> None:
        del self._leases[stream_id]
        self._free(stream_id)

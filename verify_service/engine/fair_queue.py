"""The waiting sequences, in an order that is fair between clients.

A client is charged the tokens of each of its requests that is admitted, and the client charged least comes next: one
that sends a hundred requests does not hold up another that sends one. A client that has had nothing waiting starts at
the queue's own clock, which advances by what is served a waiting client, so nobody saves up for later, and newcomers
without end do not starve those who wait (start-time fair queueing, Goyal et al. 1996, with requests for packets).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

from verify_service.core.sequence import SequenceState


class FairQueue:
    """Order of arrival within a client, fair shares of tokens between clients. Pure bookkeeping."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[SequenceState]] = {}  # by client, none of them empty
        self._charged: dict[str, float] = {}  # tokens by client, for those who wait or are ahead of the clock
        self._clock = 0.0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[SequenceState]:
        """Client by client."""
        return (sequence for waiting in self._waiting.values() for sequence in waiting)

    def push(self, sequence: SequenceState) -> None:
        """Puts a sequence behind its client's others."""
        client = sequence.request.client
        if client not in self._waiting:
            self._waiting[client] = deque()
            self._charged[client] = max(self._charged.get(client, 0.0), self._clock)
        self._waiting[client].append(sequence)
        self._length += 1

    def in_order(self) -> Iterator[SequenceState]:
        """All sequences as they would be served if nothing else came; equal clients in order of arrival."""
        heads = [(self._charged[client], queue[0].sequence_id, client, 0) for client, queue in self._waiting.items()]
        heapq.heapify(heads)
        while heads:
            charged, _, client, position = heapq.heappop(heads)
            queue = self._waiting[client]
            sequence = queue[position]
            yield sequence
            if position + 1 < len(queue):
                following = charged + sequence.max_length
                heapq.heappush(heads, (following, queue[position + 1].sequence_id, client, position + 1))

    def serve(self, sequence: SequenceState) -> None:
        """Takes a waiting sequence out and charges its client."""
        num_clients, cost = len(self._waiting), sequence.max_length
        self._charged[sequence.request.client] += cost
        self._clock += cost / num_clients
        self.remove(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Takes a sequence out without charge, if it waits."""
        client = sequence.request.client
        queue = self._waiting.get(client)
        if queue is None or sequence not in queue:
            return
        queue.remove(sequence)
        self._length -= 1
        if not queue:
            del self._waiting[client]
        # Clients that have nothing waiting and are not ahead of the clock start at the clock anyway, and where nothing
        # waits at all, nobody is held up by what was served so far.
        kept = {c: n for c, n in self._charged.items() if c in self._waiting or n > self._clock}
        self._charged = kept if self._waiting else {}

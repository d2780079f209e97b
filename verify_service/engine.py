"""The device loop: one thread that owns the target model and all committed state.

    admit → prefill a chunk → step: draft → tree → verify → accept → commit

Requests come in and events go out through thread-safe hand-overs; nothing else touches the model.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from draftwood.errors import DraftwoodError, InternalError, UnavailableError
from verify_service.decoder import Decoder
from verify_service.drafter import Drafter
from verify_service.request import Event, Failed, Finished, Request
from verify_service.scheduler import Scheduler
from verify_service.sequence import Sequence

log = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineCounters:
    """Since the start."""

    steps: int = 0
    fallback_steps: int = 0
    num_running: int = 0
    num_queued: int = 0
    pages_used: int = 0
    slots_used: int = 0


@dataclass(frozen=True, slots=True)
class _Submit:
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class _Cancel:
    sequence_id: int


class _Stop:
    """Asks the loop to end."""


class Engine:
    """Runs until stopped. `submit` and `cancel` may be called from any thread."""

    def __init__(self, decoder: Decoder, scheduler: Scheduler, drafter: Drafter, *, prefill_tokens: int) -> None:
        self.decoder, self.scheduler, self.drafter = decoder, scheduler, drafter
        self.prefill_tokens = prefill_tokens
        self.counters = EngineCounters()
        self.last_turn = time.monotonic()
        self._commands: queue.SimpleQueue[_Submit | _Cancel | _Stop] = queue.SimpleQueue()
        self._next_id = 0
        self._lock = threading.Lock()
        self._stopping = False
        self._is_waiting = True
        self._thread = threading.Thread(target=self._run, name="device-loop", daemon=True)

    def start(self) -> None:
        """Starts the device loop."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the loop; running requests fail with UNAVAILABLE."""
        self._stopping = True
        self._commands.put(_Stop())
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether the device loop's thread runs."""
        return self._thread.is_alive()

    def is_turning(self, patience_s: float) -> bool:
        """Whether the device loop waits for work or began a turn within the last `patience_s` seconds."""
        return self.is_alive and (self._is_waiting or time.monotonic() - self.last_turn < patience_s)

    def submit(self, request: Request, emit: Callable[[Event], None]) -> int:
        """Hands a checked request over; its events go to `emit`, on the engine's thread. Returns its sequence id."""
        if self._stopping or not self.is_alive:
            raise UnavailableError("the service is going down", retry_after_s=1.0)
        with self._lock:
            self._next_id += 1
            sequence_id = self._next_id
        self._commands.put(_Submit(Sequence(sequence_id, request, emit, time.perf_counter())))
        return sequence_id

    def cancel(self, sequence_id: int) -> None:
        """Ends a request without further events; everything it holds is free before the next step."""
        self._commands.put(_Cancel(sequence_id))

    @torch.inference_mode()
    def _run(self) -> None:
        while self._take_commands():
            self.last_turn, self._is_waiting = time.monotonic(), False
            try:
                self._turn()
            except Exception:
                log.exception("a step failed; its requests end with INTERNAL")
                self._fail(self.scheduler.active, InternalError("the step failed; see the service's log"))
            self.drafter.flush()
            self._count()
        going_down = UnavailableError("the service is going down", retry_after_s=1.0)
        while not self._commands.empty():  # came in behind the stop
            command = self._commands.get()
            if isinstance(command, _Submit):
                command.sequence.emit(Failed(going_down))
        self._fail((*self.scheduler.active, *self.scheduler.waiting), going_down)
        self._count()

    def _turn(self) -> None:
        """Admissions, and at most one prefill quota and one step."""
        for sequence in self.scheduler.admit():
            self.decoder.admit(sequence)
        self._count()  # whoever sees a first token sees its request running
        left = self.prefill_tokens
        for sequence in self.scheduler.prefilling():
            while left > 0 and not sequence.is_prefilled:
                left -= self.decoder.prefill_chunk(sequence, left)
            if sequence.is_prefilled:
                self._finish(sequence, self.decoder.first_token(sequence))
            if left <= 0:
                break
        batch = self.scheduler.decoding()
        if batch:
            finished, num_fallbacks = self.decoder.step(batch, self.drafter)
            self.counters.steps += 1
            self.counters.fallback_steps += num_fallbacks
            for sequence, end in finished:
                self._finish(sequence, end)

    def _finish(self, sequence: Sequence, end: Finished | None) -> None:
        """Frees first and says so afterwards: whoever sees the end sees a service that is free again."""
        if end is not None:
            self._end(sequence)
            self._count()
            sequence.emit(end)

    def _end(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.drafter.close(sequence)

    def _take_commands(self) -> bool:
        """Handles what has come in, waiting for something where there is nothing to do; False to stop."""
        while True:
            self._is_waiting = not self.scheduler.active and not self.scheduler.waiting
            try:
                command = self._commands.get(block=self._is_waiting)
            except queue.Empty:
                return True
            match command:
                case _Stop():
                    return False
                case _Submit(sequence):
                    self._submit(sequence)
                case _Cancel(sequence_id):
                    self._cancel(sequence_id)
            self._count()

    def _submit(self, sequence: Sequence) -> None:
        try:
            self.scheduler.enqueue(sequence)
        except DraftwoodError as error:
            sequence.emit(Failed(error))

    def _cancel(self, sequence_id: int) -> None:
        for sequence in (*self.scheduler.active, *self.scheduler.waiting):
            if sequence.sequence_id == sequence_id:
                self._end(sequence)
                self.drafter.flush()

    def _fail(self, sequences: Iterable[Sequence], error: DraftwoodError) -> None:
        for sequence in tuple(sequences):
            self._end(sequence)
            self._count()
            sequence.emit(Failed(error))

    def _count(self) -> None:
        counters, scheduler = self.counters, self.scheduler
        counters.num_running, counters.num_queued = len(scheduler.active), len(scheduler.waiting)
        counters.pages_used, counters.slots_used = scheduler.pages.num_used, scheduler.slots.num_used

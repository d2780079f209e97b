"""The device loop: one thread that owns the target model and all committed state.

    commands → deadlines → admit → a pass over prompts → step: draft → tree → verify → accept → commit

Requests come in and events go out through thread-safe hand-overs; nothing else touches the model. A turn has at most
one pass over prompts and one step, so that whatever ends a request, in whichever phase, takes effect within one step.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch

from draftwood.errors import DeadlineError, DraftwoodError, InternalError, UnavailableError
from verify_service.core.events import Event, Failed, Finished
from verify_service.core.request import Request
from verify_service.core.sequence import PREFILL_CHUNK, SequenceState
from verify_service.draft.coordinator import DraftCoordinator
from verify_service.engine.completion_rate import CompletionRate
from verify_service.engine.prefill_budget import PrefillBudget
from verify_service.engine.scheduler import Scheduler
from verify_service.step.runner import AnyRunner

log = logging.getLogger(__name__)

PATIENCE_S = 60.0  # a loop whose turn takes longer, which no step with its draft does, does not turn

RETRY_AFTER_STOP_S = 1.0


class Engine:
    """Runs until stopped. `submit`, `cancel`, `drain` and `stop` may be called from any thread."""

    def __init__(
        self,
        runner: AnyRunner,
        scheduler: Scheduler,
        drafter: DraftCoordinator,
        *,
        prefill_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runner, self.scheduler, self.coordinator = runner, scheduler, drafter
        self.prefill_tokens = prefill_tokens
        self.num_steps = 0  # since the start
        self.clock = clock
        self.last_turn = clock()
        self._quota, self._completion_rate = PrefillBudget(), CompletionRate(clock())
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None: stop
        self._next_id = 0
        self._lock = threading.Lock()
        self._retry_after_s: float | None = None  # what new requests are told once the service goes down
        self._is_stopping = False
        self._drains: list[threading.Event] = []
        self._is_waiting = True
        self._thread = threading.Thread(target=self._run, name="device-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def drain(self, timeout_s: float) -> bool:
        """Accepts nothing new from now on, and waits until everything that was accepted has ended; False where the time
        was not enough, or the loop does not run. The loop goes on until `stop`; behind a stop nothing is waited for."""
        is_done = threading.Event()
        with self._lock:
            if self._is_stopping:
                return False
            self._retry_after_s = max(timeout_s, RETRY_AFTER_STOP_S)
            self._commands.put(partial(self._drains.append, is_done))  # behind everything that was accepted
        return self.is_alive and is_done.wait(timeout_s) and self.is_alive

    def stop(self) -> None:
        """Ends the loop; running and waiting requests fail with UNAVAILABLE."""
        with self._lock:
            self._retry_after_s = self._retry_after_s or RETRY_AFTER_STOP_S
            self._is_stopping = True
            self._commands.put(None)
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def _has_died(self) -> bool:
        return self._thread.ident is not None and not self._thread.is_alive()

    def is_turning(self, patience_s: float) -> bool:
        """Whether the device loop waits for work or began a turn within the last `patience_s` seconds."""
        return self.is_alive and (self._is_waiting or self.clock() - self.last_turn < patience_s)

    def submit(self, request: Request, emit: Callable[[Event], None], *, timeout_s: float | None = None) -> int:
        """Hands a checked request over; its events go to `emit`, on the engine's thread. Returns its sequence id.

        After `timeout_s` it fails with DeadlineError, wherever it is. Before the start, it waits for it.
        """
        now = self.clock()
        with self._lock:  # nothing gets behind a drain or a stop
            if self._retry_after_s is not None or self._has_died:
                raise _going_down(self._retry_after_s or RETRY_AFTER_STOP_S)
            self._next_id += 1
            deadline = None if timeout_s is None else now + timeout_s
            sequence = SequenceState(self._next_id, request, emit, now, deadline)
            self._commands.put(partial(self._submit, sequence))
            return self._next_id

    def cancel(self, sequence_id: int) -> None:
        """Ends a request without further events; everything it holds is free before the next step."""
        self._commands.put(partial(self._cancel, sequence_id))

    @torch.inference_mode()
    def _run(self) -> None:
        while self._take_commands():
            self.last_turn, self._is_waiting = self.clock(), False
            try:
                self._expire()
                for sequence in self.scheduler.admit():
                    self.runner.admit(sequence)
                self._prefill()
                self._step()
            except Exception:
                log.exception("a step failed; its requests end with INTERNAL")
                self._fail(self.scheduler.active, InternalError("the step failed; see the service's log"))
            self.coordinator.flush()
        for drained in self._drains:
            drained.set()
        self._fail((*self.scheduler.active, *self.scheduler.waiting), _going_down(RETRY_AFTER_STOP_S))

    def _expire(self) -> None:
        """Ends the requests whose deadline has passed."""
        now, waiting = self.clock(), self.scheduler.waiting
        for sequence in (*waiting, *self.scheduler.active):
            if sequence.deadline is None or now < sequence.deadline:
                continue
            phase, retry_after_s = "was being decoded" if sequence.is_prefilled else "was being prefilled", None
            if not sequence.admitted_at:
                phase, retry_after_s = "waited for its turn", self._completion_rate.wait_s(len(waiting), now)
            error = DeadlineError(f"the deadline passed while the request {phase}", retry_after_s=retry_after_s)
            self._finish(sequence, Failed(error))

    def _prefill(self) -> None:
        """One pass over prompts: a large one where nobody decodes, else a small one if the quota allows it."""
        num_decoding = len(self.scheduler.decoding())
        if num_decoding and not self._quota.is_open:
            return
        parts = self.scheduler.prefill_parts(
            min(self.prefill_tokens, PREFILL_CHUNK) if num_decoding else self.prefill_tokens
        )
        if not parts:
            return
        started = self.clock()
        self.runner.prefill(parts)
        self._quota.spend(self.clock() - started if num_decoding else 0.0)
        for sequence, _ in parts:
            if sequence.is_prefilled:
                self._finish(sequence, self.runner.first_token(sequence))

    def _step(self) -> None:
        batch = self.scheduler.decoding()
        if not batch:
            return
        started = self.clock()
        finished = self.runner.step(batch, self.coordinator)
        num_prompts = len(self.scheduler.prefilling())
        self._quota.repay(self.clock() - started, num_prompts=num_prompts, num_answers=len(batch))
        self.num_steps += 1
        for sequence, end in finished:
            self._finish(sequence, end)

    def _finish(self, sequence: SequenceState, end: Finished | Failed | None) -> None:
        """Frees first and says so afterwards: whoever sees the end sees a service that is free again."""
        if end is not None:
            self._end(sequence)
            sequence.emit(end)

    def _end(self, sequence: SequenceState) -> None:
        if sequence.admitted_at:
            self._completion_rate.record(self.clock())
        self.scheduler.remove(sequence)
        self.runner.forget(sequence)
        self.coordinator.close(sequence)

    def _take_commands(self) -> bool:
        """Handles what has come in, waiting for something where there is nothing to do; False to stop."""
        while True:
            self._is_waiting = not self.scheduler.active and not self.scheduler.waiting
            if self._is_waiting:
                self._completion_rate.mark_idle(self.clock())
                for drained in self._drains:
                    drained.set()
            try:
                command = self._commands.get(block=self._is_waiting)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _submit(self, sequence: SequenceState) -> None:
        now = self.clock()
        self._completion_rate.mark_busy(now)
        try:
            self.scheduler.enqueue(
                sequence, retry_after_s=self._completion_rate.wait_s(len(self.scheduler.waiting), now)
            )
        except DraftwoodError as error:
            sequence.emit(Failed(error))

    def _cancel(self, sequence_id: int) -> None:
        for sequence in (*self.scheduler.active, *self.scheduler.waiting):
            if sequence.sequence_id == sequence_id:
                self._end(sequence)
                self.coordinator.flush()

    def _fail(self, sequences: Iterable[SequenceState], error: DraftwoodError) -> None:
        for sequence in tuple(sequences):
            self._finish(sequence, Failed(error))


def _going_down(retry_after_s: float) -> UnavailableError:
    return UnavailableError("the service is going down", retry_after_s=retry_after_s)

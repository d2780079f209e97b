"""A runner without a model, on a clock of its own: every pass takes as long as the test says, and is written down.

The engine runs as it is, on its thread; what a test does while it runs, it does from within a step.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Any, cast

from tests.verify_service.harness import Answer, ScriptedDrafter, collect
from verify_service.cache.pages import PageAllocator, SlotAllocator
from verify_service.core.accept import Finish
from verify_service.core.events import Event, Failed, Finished, Started, Tokens
from verify_service.core.request import Request
from verify_service.core.sequence import SequenceState
from verify_service.engine.engine import Engine
from verify_service.engine.scheduler import Scheduler

Pass = tuple[str, list[tuple[str, int]]]  # "prefill" or "step", request ids with their numbers of tokens


class FakeDecoder:
    """One token a step."""

    def __init__(self, *, prefill_s: float, step_s: float) -> None:
        self.now = 0.0
        self.prefill_s, self.step_s = prefill_s, step_s
        self.passes: list[Pass] = []
        self.on_pass: Callable[[Pass], None] = lambda _: None

    def admit(self, sequence: SequenceState) -> None:
        sequence.admitted_at = 1.0

    def forget(self, sequence: SequenceState) -> None:
        pass

    def prefill(self, parts: Sequence[tuple[SequenceState, int]]) -> None:
        self._take(self.prefill_s, ("prefill", [(s.request.request_id, length) for s, length in parts]))
        for sequence, length in parts:
            sequence.base_length += length

    def first_token(self, sequence: SequenceState) -> Finished | None:
        sequence.emit(Started())
        return self._grow(sequence)

    def step(self, batch: Sequence[SequenceState], _: object) -> list[tuple[SequenceState, Finished]]:
        self._take(self.step_s, ("step", [(s.request.request_id, 1) for s in batch]))
        ends = [(sequence, self._grow(sequence)) for sequence in batch]
        return [(sequence, end) for sequence, end in ends if end is not None]

    def _take(self, seconds: float, done: Pass) -> None:
        self.now += seconds
        self.passes.append(done)
        self.on_pass(done)

    def _grow(self, sequence: SequenceState) -> Finished | None:
        sequence.answer.append(7)
        sequence.base_length += len(sequence.answer) > 1
        sequence.emit(Tokens((7,)))
        return None if sequence.num_remaining else Finished(Finish.LENGTH, None, sequence.stats)


class Loop:
    """An engine over a fake runner."""

    def __init__(
        self,
        *,
        prefill_s: float = 1.0,
        step_s: float = 1.0,
        max_batch: int = 8,
        max_queue: int = 64,
        num_pages: int = 1000,
        prefill_tokens: int = 256,
    ) -> None:
        self.runner = FakeDecoder(prefill_s=prefill_s, step_s=step_s)
        pages, slots = PageAllocator(num_pages, 16), SlotAllocator(max_batch)
        scheduler = Scheduler(pages, slots, max_batch=max_batch, max_queue=max_queue)
        self.coordinator = ScriptedDrafter(lambda _: None)
        self.engine = Engine(
            cast("Any", self.runner),
            scheduler,
            cast("Any", self.coordinator),
            prefill_tokens=prefill_tokens,
            clock=lambda: self.runner.now,
        )
        self.ids: dict[str, int] = {}
        self._events: dict[str, queue.SimpleQueue[Event]] = {}

    def submit(
        self, name: str, prompt: int = 4, new_tokens: int = 4, *, client: str = "", timeout_s: float | None = None
    ) -> None:
        """A request by name; on the engine's thread it is taken before the next turn."""
        request = Request(request_id=name, prompt_token_ids=(1,) * prompt, max_new_tokens=new_tokens, client=client)
        self._events[name] = queue.SimpleQueue()
        self.ids[name] = self.engine.submit(request, self._events[name].put, timeout_s=timeout_s)

    def start(self) -> None:
        """What was submitted before is taken in the first turn."""
        self.engine.start()

    def cancel(self, name: str) -> None:
        self.engine.cancel(self.ids[name])

    def collect(self, name: str) -> Answer:
        return collect(self._events[name])

    def error(self, name: str) -> Exception:
        end = self.collect(name).end
        assert isinstance(end, Failed), end
        return end.error

    def passes_of(self, name: str) -> list[int]:
        """Numbers of the passes that a request took part in."""
        return [i for i, (_, parts) in enumerate(self.runner.passes) if name in dict(parts)]

    def on_pass(self, number: int, action: Callable[[], object]) -> None:
        """Does something within a pass, counted from 0."""
        before = self.runner.on_pass

        def act(done: Pass) -> None:
            before(done)
            if len(self.runner.passes) == number + 1:
                action()

        self.runner.on_pass = act

    def stop(self) -> None:
        """Ends the loop; nothing is held."""
        self.engine.stop()
        scheduler = self.engine.scheduler
        assert (scheduler.pages.num_used, scheduler.slots.num_used) == (0, 0)
        assert not scheduler.active
        assert len(scheduler.waiting) == 0

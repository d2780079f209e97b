"""Runs the choices of a plan, some at a time beside each other, and merges what they give."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from draftwood.errors import DraftwoodError, UnavailableError
from gateway.api.stats import Outcome, Stats
from gateway.generation.answer import Answer, Delta
from gateway.generation.plan import Choice, Plan
from gateway.generation.verify_client import RETRY_AFTER_S, Chunk, Finished, Started, VerifyClient
from gateway.text.tokenizer import Tokenizer

LEAST_TIMEOUT_S = 0.001
QUEUE_SIZE = 16  # updates that wait for a slow client before its calls are held up

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Opened:
    """A choice was admitted."""

    index: int


@dataclass(frozen=True, slots=True)
class Grown:
    """A choice has more text."""

    index: int
    delta: Delta


@dataclass(frozen=True, slots=True)
class Ended:
    """A choice has ended."""

    index: int
    outcome: Outcome


Update = Opened | Grown | Ended


class Watch:
    """Is told what becomes of a request; this one does not care."""

    def named(self, response_id: str, model: str) -> None:
        """Who answers, and as what."""

    def planned(self, plan: Plan) -> None:
        """The request is about to be sent to the verify service."""

    def grew(self) -> None:
        """An answer has text, or more of it."""

    def ended(self, outcome: Outcome) -> None:
        """One of its answers has ended."""

    def failed(self, error: DraftwoodError) -> None:
        """The request ends with an error."""


UNWATCHED = Watch()


@dataclass(frozen=True, slots=True)
class Generator:
    """What a generation needs beside its plan."""

    client: VerifyClient
    tokenizer: Tokenizer
    timeout_s: float
    watch: Watch = UNWATCHED

    async def run(self, plan: Plan) -> AsyncGenerator[Update]:
        """Updates of all choices as they come. Closing the iterator cancels every call at once.

        A request with more choices than the service's queue holds is served too: the later ones wait here.
        """
        places, deadline = asyncio.Semaphore(plan.max_parallel), time.monotonic() + self.timeout_s

        async def run_in_turn(index: int, choice: Choice) -> AsyncGenerator[Update]:
            async with places:
                left_s = max(LEAST_TIMEOUT_S, deadline - time.monotonic())  # the timeout is that of the whole request
                async with aclosing(self._run_choice(index, choice, left_s)) as updates:
                    async for update in updates:
                        yield update

        self.watch.planned(plan)
        sources = [run_in_turn(index, choice) for index, choice in enumerate(plan.choices)]
        try:
            async with aclosing(merged(sources)) as updates:
                async for update in updates:
                    match update:
                        case Opened():
                            pass
                        case Grown():
                            self.watch.grew()
                        case Ended():
                            self.watch.ended(update.outcome)
                    yield update
        except DraftwoodError as error:
            self.watch.failed(error)
            raise

    async def _run_choice(self, index: int, choice: Choice, timeout_s: float) -> AsyncGenerator[Update]:
        answer = Answer(self.tokenizer, choice.limits)
        num_cached, num_chunks, num_step_tokens = 0, 0, 0
        stats, counted = None, Stats()
        async with aclosing(self.client.generate(choice.options, timeout_s)) as events:
            async for event in events:
                match event:
                    case Started():
                        num_cached = event.num_cached_tokens
                        yield Opened(index)
                    case Chunk():
                        if answer.finish_reason is not None:
                            break  # more than was asked for: the limits here hold
                        if num_chunks:  # the first holds the prefill's token
                            counted = counted.with_step(event.num_drafted_tokens, event.num_accepted_tokens)
                            num_step_tokens += len(event.token_ids)
                        num_chunks += 1
                        delta = answer.push(event.token_ids, event.log_probs)
                        if delta.text or delta.tokens:
                            yield Grown(index, delta)
                        if answer.is_stop_string:
                            break
                    case Finished():
                        stats = event.stats
                        delta = answer.finish("stop" if event.is_stop else "length")
                        if delta.text or delta.tokens:
                            yield Grown(index, delta)
        if answer.finish_reason is None:
            raise UnavailableError("the verify service ended an answer without saying why", retry_after_s=RETRY_AFTER_S)
        outcome = Outcome(answer.finish_reason, answer.num_tokens, num_step_tokens, num_cached, stats or counted)
        yield Ended(index, outcome)


async def merged(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Items of all sources as they come; the first error ends it. The sources are closed when it is."""
    queue: asyncio.Queue[tuple[T] | BaseException | None] = asyncio.Queue(QUEUE_SIZE)

    async def pump(source: AsyncGenerator[T]) -> None:
        try:
            async with aclosing(source):
                async for item in source:
                    await queue.put((item,))
        except Exception as error:  # handed to whoever reads the queue
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        num_running = len(tasks)
        while num_running:
            item = await queue.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

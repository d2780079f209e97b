"""Runs the choices of a plan, some at a time beside each other, and merges what they give."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from draftwood.errors import DraftwoodError, UnavailableError
from gateway.generation.answer import Answer, Delta
from gateway.generation.hooks import NO_HOOKS, GenerationHooks
from gateway.generation.outcome import Outcome, Stats
from gateway.generation.plan import Choice, Plan
from gateway.generation.verify_client import RETRY_AFTER_S, Chunk, Finished, Started, VerifyClient
from gateway.text.tokenizer import Tokenizer

LEAST_TIMEOUT_S = 0.001
QUEUE_SIZE = 16  # updates that wait for a slow client before its calls are held up

T = TypeVar("T")
Update = Started | Delta | Outcome  # of one choice: it was admitted, it has more text, it has ended


@dataclass(frozen=True, slots=True)
class Generator:
    """What a generation needs beside its plan."""

    client: VerifyClient
    tokenizer: Tokenizer
    timeout_s: float
    hooks: GenerationHooks = NO_HOOKS

    async def run(self, plan: Plan) -> AsyncGenerator[tuple[int, Update]]:
        """Updates of all choices as they come, each with its choice's index. Closing the iterator cancels every call
        at once.

        A request with more choices than the service's queue holds is served too: the later ones wait here.
        """
        places, deadline = asyncio.Semaphore(plan.max_parallel), time.monotonic() + self.timeout_s

        async def run_in_turn(index: int, choice: Choice) -> AsyncGenerator[tuple[int, Update]]:
            async with places:
                left_s = max(LEAST_TIMEOUT_S, deadline - time.monotonic())  # the timeout is that of the whole request
                async with aclosing(self._run_choice(choice, left_s)) as updates:
                    async for update in updates:
                        yield index, update

        self.hooks.planned(plan)
        sources = [run_in_turn(index, choice) for index, choice in enumerate(plan.choices)]
        try:
            async with aclosing(merged(sources)) as updates:
                async for index, update in updates:
                    if isinstance(update, Delta):
                        self.hooks.grew()
                    elif isinstance(update, Outcome):
                        self.hooks.ended(update)
                    yield index, update
        except DraftwoodError as error:
            self.hooks.failed(error)
            raise

    async def _run_choice(self, choice: Choice, timeout_s: float) -> AsyncGenerator[Update]:
        answer = Answer(self.tokenizer, choice.limits)
        num_chunks, num_step_tokens = 0, 0
        stats, counted = None, Stats()
        async with aclosing(self.client.generate(choice.options, timeout_s)) as events:
            async for event in events:
                match event:
                    case Started():
                        yield event
                        continue
                    case Chunk():
                        if answer.finish_reason is not None:
                            break  # more than was asked for: the limits here hold
                        if num_chunks:  # the first holds the prefill's token
                            counted = counted.with_step(event.num_drafted_tokens, event.num_accepted_tokens)
                            num_step_tokens += len(event.token_ids)
                        num_chunks += 1
                        delta = answer.push(event.token_ids, event.log_probs)
                    case Finished():
                        stats = event.stats
                        delta = answer.finish("stop" if event.is_stop else "length")
                if delta.text or delta.tokens:
                    yield delta
                if answer.is_stop_string:
                    break
        if answer.finish_reason is None:
            raise UnavailableError("the verify service ended an answer without saying why", retry_after_s=RETRY_AFTER_S)
        yield Outcome(answer.finish_reason, answer.num_tokens, num_step_tokens, stats or counted)


async def merged(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Items of all sources as they come; the first error ends it. The sources are closed when it is.

    No task group of anyio or asyncio: those must be left in the task that entered them, and the items of this iterator
    are read, and the iterator is closed, by tasks that change.
    """
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

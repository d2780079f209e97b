"""Measured rounds: in each, every configuration decodes all prompts once, the order rotated from round to round."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from bench.figures.figures import Sample
from bench.figures.values import Answer, Configuration, Stats

DEFAULT_ROUNDS = 5
MIN_REPETITIONS = 20
WARM_UP_PROMPTS = 2

Decode = Callable[[Sequence[int], Configuration], Awaitable[Answer]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure."""

    prompts: Sequence[Sequence[int]]
    configurations: Sequence[Configuration]
    rounds: int
    concurrency: int = 1


def enough_rounds(rounds: int | None, num_prompts: int) -> int:
    """`rounds` if given; else DEFAULT_ROUNDS, or as many more as give MIN_REPETITIONS answers each."""
    return rounds or max(DEFAULT_ROUNDS, -(-MIN_REPETITIONS // num_prompts))


async def measure(plan: Plan, decode: Decode, advance: Callable[[str], None]) -> dict[Configuration, list[Sample]]:
    """Samples by configuration, one per round. `advance` is told the configuration before each; warm-up comes first."""
    for configuration in plan.configurations:
        advance(f"warm-up, {configuration.name}")
        await _sample(plan, plan.prompts[:WARM_UP_PROMPTS], configuration, decode)
    samples: dict[Configuration, list[Sample]] = {configuration: [] for configuration in plan.configurations}
    for number in range(plan.rounds):
        start = number % len(plan.configurations)
        for configuration in (*plan.configurations[start:], *plan.configurations[:start]):
            advance(f"round {number + 1} of {plan.rounds}, {configuration.name}")
            samples[configuration].append(await _sample(plan, plan.prompts, configuration, decode))
    return samples


async def _sample(plan: Plan, prompts: Sequence[Sequence[int]], configuration: Configuration, decode: Decode) -> Sample:
    started = time.perf_counter()
    answers = await decode_all(prompts, configuration, decode, concurrency=plan.concurrency)
    wall_s = time.perf_counter() - started
    stats = sum((answer.stats for answer in answers), Stats())
    return Sample(
        num_answers=len(answers),
        num_tokens=sum(len(answer.token_ids) for answer in answers),
        seconds=stats.decode_us / 1e6 if plan.concurrency == 1 else wall_s,
        wall_s=wall_s,
        stats=stats,
    )


async def decode_all(
    prompts: Sequence[Sequence[int]], configuration: Configuration, decode: Decode, *, concurrency: int
) -> list[Answer]:
    """Answers in the prompts' order, at most `concurrency` at once."""
    if concurrency == 1:
        return [await decode(prompt, configuration) for prompt in prompts]
    gate = asyncio.Semaphore(concurrency)

    async def one(prompt: Sequence[int]) -> Answer:
        async with gate:
            return await decode(prompt, configuration)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(prompt)) for prompt in prompts]
    return [task.result() for task in tasks]

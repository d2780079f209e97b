"""Many clients of one verify service, some of which hang up, and what became of each of their requests."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.figures.values import Answer, Configuration
from bench.run.client import VerifyClient
from draftwood.errors import DraftwoodError, OverloadedError
from draftwood.sampling import SamplingParams

MAX_PAUSE_S = 2.0  # a refused client comes back then at the latest, so that the load does not die down
PAUSE_S = 0.1  # behind a lost request
LENGTHS = (4, 16, 48, 112)
WAYS = (
    Configuration("none"),
    Configuration("dflash", 7),
    Configuration("ddtree", 3),
    Configuration("ddtree", 7),
    Configuration("ddtree", 15),
)


@dataclass(frozen=True)
class Job:
    """One request."""

    prompt: int  # number of the prompt
    max_new: int
    way: Configuration


@dataclass(frozen=True)
class Difference:
    """An answer that is not the reference's, to be judged later."""

    job: Job
    token_ids: tuple[int, ...]


@dataclass
class Tally:
    """What became of the requests."""

    completed: int = 0
    refused: int = 0
    hung_up: int = 0
    lost: list[str] = field(default_factory=list[str])
    tokens: int = 0
    drafted_steps: int = 0
    fallback_steps: int = 0
    differences: list[Difference] = field(default_factory=list[Difference])

    @property
    def total(self) -> int:
        """Requests in all."""
        return self.completed + self.refused + self.hung_up + len(self.lost)


def hangs_up(number: int, share: float) -> bool:
    """Whether the request with this number is given up: spread evenly, and never more than the share."""
    return int((number + 1) * share) > int(number * share)


class Crowd:
    """Sends requests one after the other from each client until told to stop, and compares each whole answer."""

    def __init__(
        self,
        client: VerifyClient,
        prompts: Sequence[Sequence[int]],
        expected: Sequence[Sequence[int]],  # greedy answers by prompt, without drafts
        *,
        hang_ups: float,
        seed: int,
    ) -> None:
        self._client, self._prompts, self._expected = client, prompts, expected
        self._hang_ups, self._random = hang_ups, random.Random(seed)
        self._numbers = itertools.count()
        self.tally = Tally()

    async def run(self, num_clients: int, is_over: Callable[[], bool]) -> Tally:
        """All clients, until it is over and each has ended its request."""
        async with asyncio.TaskGroup() as group:
            for _ in range(num_clients):
                group.create_task(self._client_of_many(is_over))
        return self.tally

    async def _client_of_many(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            await self._one(next(self._numbers))

    async def _one(self, number: int) -> None:
        job = Job(self._random.randrange(len(self._prompts)), self._random.choice(LENGTHS), self._random.choice(WAYS))
        prompt, tally = self._prompts[job.prompt], self.tally
        try:
            if hangs_up(number, self._hang_ups):
                num_messages = self._random.randrange(4)
                await self._client.hang_up(prompt, job.way, max_new=job.max_new, num_messages=num_messages)
                tally.hung_up += 1
                return
            answer = await self._client.generate(prompt, job.way, max_new=job.max_new, sampling=SamplingParams())
        except OverloadedError as error:
            if error.retry_after_s is None:
                tally.lost.append(f"refused without a retry time: {error.message}")
                return
            tally.refused += 1
            await asyncio.sleep(min(error.retry_after_s, MAX_PAUSE_S))
        except DraftwoodError as error:
            tally.lost.append(f"{type(error).__name__}: {error.message}")
            await asyncio.sleep(PAUSE_S)
        else:
            self._count(job, answer)

    def _count(self, job: Job, answer: Answer) -> None:
        tally = self.tally
        tally.completed += 1
        tally.tokens += len(answer.token_ids)
        tally.drafted_steps += answer.stats.num_drafted_steps
        tally.fallback_steps += answer.stats.num_fallback_steps
        if answer.token_ids != tuple(self._expected[job.prompt][: job.max_new]):
            tally.differences.append(Difference(job, answer.token_ids))

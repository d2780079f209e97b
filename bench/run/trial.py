"""One soak: services are started, a crowd is let loose on them, the drafter killed again and again; what came of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.figures.contract import differences
from bench.figures.slope import Slope, fit
from bench.figures.values import Configuration
from bench.run.client import VerifyClient
from bench.run.crowd import LENGTHS, Crowd, Tally
from bench.run.measure import decode_all
from bench.run.prompts import PromptEncoder
from bench.run.reference import reference
from draftwood import checkpoint
from draftwood.cli.console import err
from draftwood.cli.machine import resident_memory_bytes
from draftwood.cli.stack.drafter import require_drafter
from draftwood.cli.stack.launch import private_config, private_stack
from draftwood.cli.stack.ports import free_port
from draftwood.cli.stack.stack import Stack, StackConfig
from draftwood.errors import DraftwoodError
from draftwood.sampling import SamplingParams

LEAST_COMPLETED = 0.95
SETTLE_S = 60.0  # memory is looked at from then on, or from the middle of a shorter run
SAMPLE_S = 1.0
RESTART_S = 0.5
UNTIL_IDLE_S = 30.0
POLL_S = 0.2
LONG_OF = 6  # texts in a long prompt
REFERENCE_CONCURRENCY = 4
DRAFT_GAUGE = "draftwood_draft_sequences"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do."""

    clients: int
    seconds: float
    hang_ups: float
    kill_every_s: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of it."""

    plan: Plan
    tally: Tally
    kills: int
    close_calls: int
    failures: list[str]  # answers that rounding does not explain
    memory: Slope  # of the verify service's resident bytes
    resident_bytes: tuple[int, int]  # at the first and the last sample
    left_over: dict[str, int]  # what should be 0 at the end

    @property
    def findings(self) -> list[str]:
        """What did not hold."""
        tally, found = self.tally, list[str]()
        if tally.completed < LEAST_COMPLETED * tally.total:
            found.append(f"only {tally.completed} of {tally.total} requests were completed")
        if tally.lost:
            found.append(f"{len(tally.lost)} requests were lost, the first: {tally.lost[0]}")
        found += self.failures
        if self.memory.is_judged and not self.memory.is_flat:
            found.append("the verify service's memory grows")
        held = [f"{name} {count}" for name, count in self.left_over.items() if count]
        if held:
            found.append(f"not back to zero: {', '.join(held)}")
        return found


async def run_trial(texts: Sequence[str], plan: Plan, values: dict[str, Any]) -> Outcome:
    """Starts a stack with the option values, and soaks it."""
    directory = checkpoint.resolve(values["target"], setting="target")
    long = [" ".join(texts[i : i + LONG_OF]) for i in range(0, len(texts), LONG_OF)]
    prompts = PromptEncoder(directory).encode_all([*texts[: 2 * len(long)], *long])
    config, metrics_port = _config(values)
    async with (
        private_stack(config, restart_delays_s=(RESTART_S,)) as stack,
        VerifyClient(stack.verify_address) as client,
    ):
        await require_drafter(stack.verify_address)
        with err.status("Decoding without drafts…"):
            expected = await _expected(client, prompts)
        crowd = Crowd(client, prompts, expected, hang_ups=plan.hang_ups, seed=plan.seed)
        started = time.monotonic()
        async with _Disturbance(stack, plan.kill_every_s) as disturbance:
            with err.status(f"Soaking for {plan.seconds:g} s…"):
                tally = await crowd.run(plan.clients, lambda: time.monotonic() - started > plan.seconds)
            disturbance.stop_killing()
            left_over = await _left_over(client, metrics_port)
        dtype = (await client.target()).dtype
    close_calls, failures = await _judge(directory, prompts, expected, tally, dtype, values)
    samples = disturbance.samples
    return Outcome(
        plan=plan,
        tally=tally,
        kills=disturbance.kills,
        close_calls=close_calls,
        failures=failures,
        memory=fit(samples, since_s=min(SETTLE_S, plan.seconds / 2)),
        resident_bytes=(round(samples[0][1]), round(samples[-1][1])),
        left_over=left_over,
    )


def _config(values: dict[str, Any]) -> tuple[StackConfig, int]:
    """A stack without a gateway, and the port that its drafter's metrics are on."""
    config = replace(private_config(values), gateway=None)
    assert config.draft is not None, "a soak has a drafter"
    port = free_port(config.draft.host)
    return replace(config, draft=replace(config.draft, metrics_port=port)), port


async def _expected(client: VerifyClient, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The longest greedy answers without drafts, of which shorter ones are the beginnings."""

    async def decode(prompt: Sequence[int], way: Configuration) -> Any:
        return await client.generate(prompt, way, max_new=max(LENGTHS), sampling=SamplingParams())

    answers = await decode_all(prompts, Configuration("none"), decode, concurrency=REFERENCE_CONCURRENCY)
    return [answer.token_ids for answer in answers]


class _Disturbance:
    """Beside the load: the drafter is killed and comes back, and the verify service's memory is written down."""

    def __init__(self, stack: Stack, kill_every_s: float) -> None:
        self._stack, self._kill_every_s = stack, kill_every_s
        self.kills = 0
        self.samples: list[tuple[float, float]] = []  # seconds, resident bytes
        self._tasks: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(work) for work in (self._stack.supervise(), self._sample(), self._kill())]
        return self

    async def __aexit__(self, *_exception: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stop_killing(self) -> None:
        """The drafter may live."""
        self._tasks[-1].cancel()

    async def _kill(self) -> None:
        while self._kill_every_s:
            await asyncio.sleep(self._kill_every_s)
            pid = self._stack.pids.get("draft")
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                self.kills += 1

    async def _sample(self) -> None:
        started = time.monotonic()
        while True:
            resident = resident_memory_bytes(self._stack.pids.get("verify", 0))
            if resident:
                self.samples.append((time.monotonic() - started, float(resident)))
            await asyncio.sleep(SAMPLE_S)


async def _left_over(client: VerifyClient, metrics_port: int) -> dict[str, int]:
    """What is still held once everybody is gone; a service gets some time to let go of it."""
    deadline = time.monotonic() + UNTIL_IDLE_S
    while True:
        try:
            held = await client.load() | {"sequences at the drafter": await _draft_sequences(metrics_port)}
        except (DraftwoodError, httpx.HTTPError) as error:  # the drafter may be starting
            held = {f"answers of a service ({error or type(error).__name__})": 1}
        if not any(held.values()) or time.monotonic() > deadline:
            return held
        await asyncio.sleep(POLL_S)


async def _draft_sequences(port: int) -> int:
    async with httpx.AsyncClient(trust_env=False) as http:
        page = (await http.get(f"http://127.0.0.1:{port}/metrics")).raise_for_status().text
    families = text_string_to_metric_families(page)
    return round(next(sample.value for family in families for sample in family.samples if sample.name == DRAFT_GAUGE))


async def _judge(
    directory: Path,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[tuple[int, ...]],
    tally: Tally,
    dtype: str,
    values: dict[str, Any],
) -> tuple[int, list[str]]:
    """Close calls, and the answers that rounding does not explain; transformers is asked only where answers differ."""
    if not tally.differences:
        return 0, []
    close, failures = 0, list[str]()
    async with reference(directory, dtype="float32", device=values["device"], threads=values["threads"]) as rival:
        for job, token_ids in {(d.job, d.token_ids) for d in tally.differences}:
            judged = await rival.judge(prompts[job.prompt], token_ids)
            parted = differences(token_ids, expected[job.prompt][: job.max_new], judged, dtype=dtype)
            close += sum(not difference.is_failure for difference in parted)
            failures += [
                f"{job.way.name}, prompt {job.prompt + 1}, token {difference.position + 1}: {difference.token_id}, not "
                f"{difference.reference_id}"
                for difference in parted
                if difference.is_failure
            ]
    return close, failures

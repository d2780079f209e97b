"""`draftwood bench prefill`: what a long prompt costs the answers that are being decoded beside it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.table import Table

from bench.decode import configurations
from bench.figures.values import Configuration
from bench.run.client import VerifyClient
from bench.run.options import json_option, prompts_argument, write_json
from bench.run.prompts import load
from bench.run.session import STACK_FIELDS, open_session, session_options
from draftwood.cli.console import err, out
from draftwood.cli.stack.launch import run_stoppable
from draftwood.config import VerifyConfig
from draftwood.errors import InternalError

ANSWER_TOKENS = 1800  # more than a round takes; what is left is given up
ALONE_TOKENS = 64  # of each answer, before the prompt comes and after it


@dataclass(frozen=True, kw_only=True)
class Round:
    """Median seconds per token of the answers, before, beside and after the prompt, and how long the prompt took."""

    before_s: float
    beside_s: float
    after_s: float
    prefill_s: float

    @property
    def alone_s(self) -> float:
        """Without the prompt. Answers that run on past their end repeat themselves, which drafts profit from, so that
        only the mean of before and after says what beside would have been."""
        return (self.before_s + self.after_s) / 2

    @property
    def ratio(self) -> float:
        """How much slower the prompt makes them."""
        return self.beside_s / self.alone_s


class _Answer:
    """One answer's tokens as they come."""

    def __init__(self, client: VerifyClient, prompt: Sequence[int], way: Configuration) -> None:
        self.arrivals: list[tuple[float, int]] = []  # when, and how many
        self.has_changed = asyncio.Event()
        self.task = asyncio.create_task(self._read(client, prompt, way))

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    async def _read(self, client: VerifyClient, prompt: Sequence[int], way: Configuration) -> None:
        try:
            async with aclosing(client.stream(prompt, way, max_new=ANSWER_TOKENS, ignore_stop=True)) as messages:
                async for token_ids in messages:
                    self.arrivals.append((time.perf_counter(), len(token_ids)))
                    self.has_changed.set()
            raise InternalError("an answer ended before the last measurement")
        finally:
            self.has_changed.set()

    async def grow(self, num_tokens: int) -> None:
        """Waits for as many more tokens. Raises what ended the answer before."""
        goal = self.num_tokens + num_tokens
        while self.num_tokens < goal:
            if self.task.done():
                self.task.result()
            self.has_changed.clear()
            await self.has_changed.wait()

    def seconds_per_token(self, begin: float, end: float) -> float:
        return (end - begin) / max(sum(count for at, count in self.arrivals if begin < at <= end), 1)


async def measure_round(
    client: VerifyClient, prompts: Sequence[Sequence[int]], long_prompt: Sequence[int], way: Configuration
) -> Round:
    """One answer per prompt, all at once, and then the long prompt beside them."""
    answers = [_Answer(client, prompt, way) for prompt in prompts]
    try:
        await asyncio.gather(*(answer.grow(1) for answer in answers))
        begin = time.perf_counter()
        await asyncio.gather(*(answer.grow(ALONE_TOKENS) for answer in answers))
        sent = time.perf_counter()
        async with aclosing(client.stream(long_prompt, way, max_new=1, ignore_stop=True)) as messages:
            await anext(messages)
        end = time.perf_counter()
        await asyncio.gather(*(answer.grow(ALONE_TOKENS) for answer in answers))
        later = time.perf_counter()
    finally:
        for answer in answers:
            answer.task.cancel()
        await asyncio.gather(*(answer.task for answer in answers), return_exceptions=True)
    spans = ((begin, sent), (sent, end), (end, later))
    before, beside, after = (median(answer.seconds_per_token(*span) for answer in answers) for span in spans)
    return Round(before_s=before, beside_s=beside, after_s=after, prefill_s=end - sent)


@click.command()
@prompts_argument
@click.option("--length", type=click.IntRange(1), default=1500, show_default=True, help="Tokens of the long prompt.")
@click.option("--running", type=click.IntRange(1), default=8, show_default=True, help="Answers beside it.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Rounds of each algorithm.")
@click.option("--budget", type=click.IntRange(1), default=7, show_default=True, help="Tree budget.")
@json_option
@session_options()
def prefill(
    prompts: Path | None, length: int, running: int, rounds: int, budget: int, json_path: Path | None, **values: Any
) -> None:
    """What a long prompt costs the answers beside it.

    Some answers are decoded together; then the long prompt comes, and each answer's time per token until the prompt is
    in the caches is compared with the mean of before and after. Medians over the answers, and of these over the rounds.

    \b
    Examples:
      draftwood bench prefill
      draftwood bench prefill --length 4000 --running 4 --target DIR --draft DIR
    """
    texts = load(prompts).texts
    results = run_stoppable(_prefill(texts, length, running, rounds, budget, values))
    table = Table("", "ms per token\nalone", "ms per token\nbeside it", "ratio", "prompt\nseconds")
    for name, found in results.items():
        quiet, beside = (1e3 * median(getattr(r, field) for r in found) for field in ("alone_s", "beside_s"))
        ratio, seconds = median(r.ratio for r in found), median(r.prefill_s for r in found)
        table.add_row(name, f"{quiet:.2f}", f"{beside:.2f}", f"{ratio:.2f}", f"{seconds:.2f}")
    out.print(table)
    measured = {name: [asdict(r) | {"ratio": r.ratio} for r in found] for name, found in results.items()}
    write_json({"length": length, "running": running, "budget": budget, "rounds": measured}, json_path)


async def _prefill(
    texts: Sequence[str], length: int, running: int, rounds: int, budget: int, values: dict[str, Any]
) -> dict[str, list[Round]]:
    stack_values = {name: values[name] for name in STACK_FIELDS}
    async with open_session(
        values["verify"], stack_values, needs_drafter=True,
        max_concurrency=running + 1, max_tree_budget=max(budget, VerifyConfig.max_tree_budget),
    ) as session:  # fmt: skip
        encoded = session.encoder.encode_all(texts)
        prompts = list(itertools.islice(itertools.cycle(encoded), running))
        long_prompt = list(itertools.islice(itertools.cycle(itertools.chain(*encoded)), length))
        results: dict[str, list[Round]] = {}
        for way in configurations(["none", "ddtree"], (budget,), ()):
            with err.status(f"Measuring {way.name}…"):
                found = [await measure_round(session.client, prompts, long_prompt, way) for _ in range(rounds + 1)]
            results[way.name] = found[1:]  # the first is the warm-up
        return results

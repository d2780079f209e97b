"""`draftwood bench exact`: answers against transformers' own decoding, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from bench.decode import configurations
from bench.figures.contract import NOISE, Difference, differences
from bench.figures.values import Answer, Configuration
from bench.run.measure import decode_all
from bench.run.options import prompts_argument
from bench.run.prompts import load
from bench.run.reference import Reference, reference
from bench.run.session import STACK_FIELDS, Session, open_session, session_options
from draftwood.cli.console import err, out
from draftwood.cli.options import int_list
from draftwood.cli.stack.launch import run_stoppable
from draftwood.config import ALGORITHMS, VerifyConfig
from draftwood.sampling import SamplingParams


@dataclass(frozen=True)
class Comparison:
    """All answers of one configuration at one concurrency against the reference."""

    configuration: Configuration
    concurrency: int
    num_answers: int
    num_tokens: int
    found: list[tuple[int, Difference]]  # number of the prompt, difference

    @property
    def num_failures(self) -> int:
        """Differences that rounding does not explain."""
        return sum(difference.is_failure for _, difference in self.found)


@click.command()
@prompts_argument
@click.option("--budgets", default="7,15,31", show_default=True, callback=int_list, help="Tree budgets to check.")
@click.option("--chains", default="15", show_default=True, callback=int_list, help="Lengths of chains to check.")
@click.option(
    "--concurrency",
    default="1,8",
    show_default=True,
    callback=int_list,
    help="How many prompts are decoded at once; each is checked.",
)
@click.option("--limit", type=click.IntRange(1), help="Use only the first prompts.")
@click.option("--max-new", type=click.IntRange(2), default=112, show_default=True, help="Longest answer in tokens.")
@session_options(dtype="float32")
def exact(prompts: Path | None, limit: int | None, max_new: int, concurrency: tuple[int, ...], **values: Any) -> None:
    """Compare answers with transformers' own, token by token.

    Decodes greedily with no drafts, chains and trees, alone and several at once, and compares each token with what
    transformers' generate gives in float32. Where they differ, the position is listed with the gap between the
    reference's two best logits. A gap that the number format's rounding explains may fall either way; any other
    difference is a failure and makes the exit code 1.

    \b
    Rounding is taken as this share of the largest logit:
      float32 5e-05, float16 0.005, bfloat16 0.03

    \b
    Examples:
      draftwood bench exact
      draftwood bench exact --target DIR --draft DIR --budgets 31,63 --limit 8
      draftwood bench exact --dtype bfloat16
    """
    texts = load(prompts).first(limit).texts
    ways = configurations(ALGORITHMS, values.pop("budgets"), values.pop("chains"))
    raise SystemExit(run_stoppable(_exact(texts, ways, concurrency, max_new, values)))


async def _exact(
    texts: Sequence[str],
    ways: Sequence[Configuration],
    concurrency: Sequence[int],
    max_new: int,
    values: dict[str, Any],
) -> int:
    stack_values = {name: values[name] for name in STACK_FIELDS}
    largest = max(way.tree_budget for way in ways)
    async with open_session(
        values["verify"], stack_values, needs_drafter=largest > 0,
        max_concurrency=max(concurrency), max_tree_budget=max(largest, VerifyConfig.max_tree_budget),
    ) as session, reference(
        session.directory, dtype="float32", device=values["device"], threads=values["threads"]
    ) as rival:  # fmt: skip
        checker = _Checker(session, rival, session.encoder.encode_all(texts), max_new)
        with err.status("Decoding with transformers…") as status:
            await checker.decode_reference()
            results: list[Comparison] = []
            for way, at_once in ((way, at_once) for at_once in concurrency for way in ways):
                status.update(f"Checking {way.name}, {at_once} at once…")
                results.append(await checker.check(way, at_once))
    return report(results, session.target.dtype)


class _Checker:
    """Decodes and compares."""

    def __init__(self, session: Session, rival: Reference, prompts: list[list[int]], max_new: int) -> None:
        self._session, self._rival, self._prompts, self._max_new = session, rival, prompts, max_new
        self._expected: list[Answer] = []

    async def decode_reference(self) -> None:
        """transformers' answers, once for all configurations."""
        greedy = {"temperature": 0.0}
        self._expected = [
            await self._rival.generate(prompt, max_new=self._max_new, sampling=greedy) for prompt in self._prompts
        ]

    async def check(self, way: Configuration, at_once: int) -> Comparison:
        """One configuration's answers; only those that differ are looked at logit by logit."""

        async def decode(prompt: Sequence[int], configuration: Configuration) -> Answer:
            return await self._session.client.generate(
                prompt, configuration, max_new=self._max_new, sampling=SamplingParams()
            )

        answers = await decode_all(self._prompts, way, decode, concurrency=at_once)
        found: list[tuple[int, Difference]] = []
        for number, (prompt, answer, expected) in enumerate(zip(self._prompts, answers, self._expected, strict=True)):
            if answer.token_ids != expected.token_ids:
                judged = await self._rival.judge(prompt, answer.token_ids)
                dtype = self._session.target.dtype
                parted = differences(answer.token_ids, expected.token_ids, judged, dtype=dtype)
                found += [(number, difference) for difference in parted]
        return Comparison(way, at_once, len(answers), sum(len(answer.token_ids) for answer in answers), found)


def report(results: Sequence[Comparison], dtype: str) -> int:
    """Prints what was found; the exit code."""
    table = Table("", "at once", "answers", "tokens", "close calls", "failures", title=f"Against transformers, {dtype}")
    for result in results:
        close = len(result.found) - result.num_failures
        cells = (result.concurrency, result.num_answers, result.num_tokens, close, result.num_failures)
        table.add_row(result.configuration.name, *(str(cell) for cell in cells))
    out.print(table)
    for line in listing(results):
        out.print(escape(line), soft_wrap=True)
    failures = sum(result.num_failures for result in results)
    if failures:
        out.print(
            f"[red]{failures} differences are no rounding[/red] (more than {NOISE[dtype]:g} of the largest logit)."
        )
        return 1
    total = sum(len(result.found) for result in results)
    verdict = (
        "every token is the same" if total == 0 else f"{total} close calls fell the other way, nothing else differs"
    )
    out.print(f"[green]Exact[/green]: {verdict}.")
    return 0


def listing(results: Sequence[Comparison]) -> Iterator[str]:
    """One line for each difference."""
    for result in results:
        for number, difference in result.found:
            yield (
                f"{result.configuration.name}, {result.concurrency} at once, prompt {number + 1}, "
                f"token {difference.position + 1}: {difference.token_id}, not {difference.reference_id}; the two best "
                f"are {difference.best_gap:.2g} apart, the choice {difference.chosen_gap:.2g} from the best"
                f"{' — FAILURE' if difference.is_failure else ''}"
            )

"""`draftwood demo`: the same question with draft trees and without, side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from draftwood.cli.chat import stream_to_console
from draftwood.cli.console import err, out
from draftwood.cli.gateway_client import Answer, Question, RestClient
from draftwood.cli.stack.drafter import require_drafter
from draftwood.cli.stack.launch import private_config, private_settings, private_stack, run_stoppable

QUESTION = "How do I prepare for a job interview?"  # its acceptance is middling among the shipped questions
WARM_UP = "How can I fall asleep more easily at night?"
WARM_UP_TOKENS = 48
_DRAFTED, _PLAIN = "ddtree", "none"


@dataclass(frozen=True)
class Comparison:
    """Answers to one question, one a repeat, with draft trees and without."""

    drafted: list[Answer]
    plain: list[Answer]

    @property
    def is_identical(self) -> bool:
        """Whether all answers have the same text."""
        return len({answer.text for answer in (*self.drafted, *self.plain)}) == 1

    @property
    def speed_up(self) -> float:
        """Ratio of the two ways' decoding speeds, each the median over the repeats."""
        return _speed(self.drafted) / _speed(self.plain)


@click.command()
@click.option("--question", default=QUESTION, show_default=True, help="What to ask.")
@click.option("--max-tokens", default=112, show_default=True, help="Longest answer in tokens.")
@click.option(
    "--tree-budget",
    type=click.IntRange(1, 255),
    help="Nodes of a tree without the root; the service's default if not given.",
)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="How often each way is measured.")
@private_settings(dtype="float32", compile=False)
def demo(question: str, max_tokens: int, tree_budget: int | None, repeats: int, **values: Any) -> None:
    """Answer one question with draft trees and without, and compare.

    Starts the three services on free ports, shows the answer as it arrives, asks again without drafts, compares texts
    and speed, and stops the services. In float32 the texts are equal; the exit code is 1 if they are not. Steps are not
    compiled by default, because the first compilation takes longer than the demo should; with --compile both ways are
    faster, and later starts find the compiled steps in the cache.

    \b
    Examples:
      draftwood demo
      draftwood demo --question "Write a poem about rain." --compile
    """
    asked = Question(text=question, max_tokens=max_tokens, temperature=0.0, tree_budget=tree_budget)
    raise SystemExit(run_stoppable(_demo(asked, repeats, values)))


async def _demo(question: Question, repeats: int, values: dict[str, Any]) -> int:
    async with private_stack(private_config(values)) as stack:
        await require_drafter(stack.verify_address)
        async with RestClient(stack.url) as client:
            comparison = await compare(client, question, repeats)
    return report(comparison, f"{values['dtype']}, {'compiled' if values['compile'] else 'not compiled'}")


async def compare(client: RestClient, question: Question, repeats: int) -> Comparison:
    """Warms both ways up, shows the answer once, then measures them in turn."""
    model = await client.model()
    drafted, plain = replace(question, algorithm=_DRAFTED), replace(question, algorithm=_PLAIN, tree_budget=None)
    with err.status("Warming up…"):
        for way in (drafted, plain):
            await silent(client, replace(way, text=WARM_UP, max_tokens=WARM_UP_TOKENS), model)
    out.print(f"[bold]{escape(question.text)}[/bold]\n")
    await stream_to_console(client, drafted, model)
    result = Comparison([], [])
    with err.status("Measuring with drafts and without, in turn…"):
        for i in range(repeats):
            ways = [(drafted, result.drafted), (plain, result.plain)]
            for way, answers in ways if i % 2 == 0 else ways[::-1]:
                answers.append(await silent(client, way, model))
    return result


async def silent(client: RestClient, question: Question, model: str) -> Answer:
    """The whole answer, without showing it."""
    events = [event async for event in client.stream(question, model)]
    answer = events[-1]
    assert isinstance(answer, Answer), "a stream ends with the whole answer"
    return answer


def report(comparison: Comparison, services: str) -> int:
    """Prints the comparison, with how the services ran; the exit code."""
    out.print()
    out.print(table(comparison))
    repeats = len(comparison.drafted)
    out.print(
        f"Measured by the verify service from the first token to the last, prefill left out; medians of {repeats} "
        f"repeats, both ways in turn, after another question as warm-up. Batch 1, greedy, {services}, "
        f"{comparison.plain[0].figures.num_tokens} tokens.",
        style="dim",
    )
    if not comparison.is_identical:
        out.print("[red]The texts differ:[/red]")
        for text in {answer.text for answer in (*comparison.drafted, *comparison.plain)}:
            out.print(f"- {text}", markup=False)
        return 1
    ratio = comparison.speed_up
    out.print(f"[green]The texts are identical.[/green] With draft trees the answer comes {ratio:.2f} times as fast.")
    return 0


def table(comparison: Comparison) -> Table:
    """Figures side by side."""
    result = Table("", "draft trees", "no drafts", title="Draftwood")
    columns = (comparison.drafted, comparison.plain)

    def row(name: str, cell: Callable[[list[Answer]], str]) -> None:
        result.add_row(name, *(cell(answers) for answers in columns))

    row("tokens/s", lambda answers: f"{_speed(answers):.1f}")
    row("tokens per step", lambda answers: f"{answers[0].figures.tokens_per_step:.2f}")
    row("steps", lambda answers: f"{answers[0].figures.steps}")
    row("ms per step", lambda answers: f"{median(a.figures.decode_ms / max(a.figures.steps, 1) for a in answers):.1f}")
    row("draft tokens accepted", lambda answers: _accepted(answers[0]))
    for stage in comparison.plain[0].figures.stage_ms:
        row(f"{stage}, ms per step", partial(_stage, stage))
    return result


def _speed(answers: list[Answer]) -> float:
    return median(answer.figures.tokens_per_s for answer in answers)


def _accepted(answer: Answer) -> str:
    figures = answer.figures
    return f"{figures.accepted} of {figures.drafted} ({figures.acceptance:.0%})" if figures.drafted else "-"


def _stage(stage: str, answers: list[Answer]) -> str:
    return f"{median(a.figures.stage_ms[stage] / max(a.figures.steps, 1) for a in answers):.2f}"

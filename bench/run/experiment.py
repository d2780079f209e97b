"""A speed measurement from options to results: what `decode` and `sweep` have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.figures.figures import Row, rows
from bench.figures.values import SHADOW, Answer, Configuration, Target
from bench.run.measure import DEFAULT_ROUNDS, MIN_REPETITIONS, Plan, enough_rounds, measure
from bench.run.options import json_option, prompts_argument
from bench.run.prompts import PromptSet, load
from bench.run.reference import Reference, reference
from bench.run.session import STACK_FIELDS, Session, open_session, session_options
from draftwood.cli.console import err
from draftwood.config import VerifyConfig
from draftwood.errors import ConfigError
from draftwood.sampling import SamplingParams

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

TRANSFORMERS = Configuration("transformers")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What to measure and how."""

    prompts: PromptSet
    configurations: tuple[Configuration, ...]
    rounds: int
    max_new: int
    concurrency: int
    sampling: SamplingParams
    with_reference: bool
    verify: str | None
    stack_values: dict[str, Any]

    @property
    def needs_drafter(self) -> bool:
        """Whether any configuration drafts."""
        return any(configuration.algorithm in ("dflash", "ddtree", SHADOW) for configuration in self.configurations)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came out."""

    experiment: Experiment
    target: Target
    rows: list[Row]
    peak_memory: dict[str, int]  # bytes by process


def experiment_options(function: AnyFunction) -> AnyFunction:
    """The argument and options that `Experiment` is built from, the configurations excepted."""
    options = [
        prompts_argument,
        click.option(
            "--rounds",
            type=click.IntRange(1),
            help=f"Rounds; in each, every configuration decodes all prompts once. Without it {DEFAULT_ROUNDS}, or with "
            f"few prompts as many as give {MIN_REPETITIONS} answers of each configuration.",
        ),
        click.option("--limit", type=click.IntRange(1), help="Use only the first prompts."),
        click.option(
            "--max-new", type=click.IntRange(2), default=112, show_default=True, help="Longest answer in tokens."
        ),
        click.option("--temperature", default=0.0, show_default=True, help="0 is greedy; above, tokens are drawn."),
        click.option("--top-p", default=1.0, show_default=True, help="Draw from the likeliest tokens with this mass."),
        click.option("--seed", default=0, show_default=True, help="Seed of the draws."),
        click.option(
            "--concurrency",
            type=click.IntRange(1),
            default=1,
            show_default=True,
            help="Prompts decoded at once; tokens/s are then of all together, over wall time with prefill.",
        ),
        click.option(
            "--reference",
            "with_reference",
            is_flag=True,
            help="Measure transformers' generate too, in the same rounds, with the same threads.",
        ),
        json_option,
        click.option(
            "--plot",
            "plot_path",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Draw tokens/s and tokens per step to a PNG file.",
        ),
        session_options(),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def build_experiment(values: dict[str, Any], configurations: Sequence[Configuration]) -> Experiment:
    """An experiment from option values. Raises ConfigError and InvalidRequestError naming what is wrong."""
    prompts = load(values["prompts"]).first(values["limit"])
    if values["with_reference"] and values["concurrency"] > 1:
        raise ConfigError("--reference decodes one prompt at a time; leave --concurrency at 1", field="concurrency")
    return Experiment(
        prompts=prompts,
        configurations=(*configurations, *([TRANSFORMERS] if values["with_reference"] else [])),
        rounds=enough_rounds(values["rounds"], len(prompts.texts)),
        max_new=values["max_new"],
        concurrency=values["concurrency"],
        sampling=SamplingParams(temperature=values["temperature"], top_p=values["top_p"], seed=values["seed"]),
        with_reference=values["with_reference"],
        verify=values["verify"],
        stack_values={name: values[name] for name in STACK_FIELDS},
    )


async def run(experiment: Experiment) -> Result:
    """Measures; progress is shown on standard error."""
    largest = max((configuration.tree_budget for configuration in experiment.configurations), default=0)
    async with open_session(
        experiment.verify, experiment.stack_values, needs_drafter=experiment.needs_drafter,
        max_concurrency=experiment.concurrency, max_tree_budget=max(largest, VerifyConfig.max_tree_budget),
    ) as session, AsyncExitStack() as exits:  # fmt: skip
        rival = None
        if experiment.with_reference:
            rival = await exits.enter_async_context(_rival(experiment, session))
        plan = Plan(
            prompts=session.encoder.encode_all(experiment.prompts.texts),
            configurations=experiment.configurations,
            rounds=experiment.rounds,
            concurrency=experiment.concurrency,
        )
        decode = _decoder(experiment, session, rival)
        with _Progress(len(plan.configurations) * (plan.rounds + 1)) as advance:
            samples = await measure(plan, decode, advance)
        memory = await session.peak_memory()
        if rival is not None:
            memory["transformers"] = await rival.peak_memory_bytes()
        return Result(experiment=experiment, target=session.target, rows=rows(samples), peak_memory=memory)


def _rival(experiment: Experiment, session: Session) -> Any:
    values = experiment.stack_values
    return reference(session.directory, dtype=session.target.dtype, device=values["device"], threads=values["threads"])


def _decoder(experiment: Experiment, session: Session, rival: Reference | None) -> Any:
    sampling = experiment.sampling

    async def decode(prompt: Sequence[int], configuration: Configuration) -> Answer:
        if configuration == TRANSFORMERS:
            assert rival is not None, "measured only where it was started"
            drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p}
            return await rival.generate(prompt, max_new=experiment.max_new, sampling=drawn)
        return await session.client.generate(prompt, configuration, max_new=experiment.max_new, sampling=sampling)

    return decode


class _Progress:
    """A bar with the configuration being measured; without a terminal, one line per round."""

    def __init__(self, total: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=err, transient=True)
        self._task = self._progress.add_task("measuring", total=total)
        self._started = False
        self._round = ""

    def __enter__(self) -> Callable[[str], None]:
        self._progress.start()
        return self._advance

    def __exit__(self, *_exception: object) -> None:
        self._progress.stop()

    def _advance(self, what: str) -> None:
        self._progress.update(self._task, description=what, advance=1 if self._started else 0)
        self._started = True
        number = what.partition(",")[0]
        if not err.is_terminal and number != self._round:
            err.print(number, markup=False)
        self._round = number

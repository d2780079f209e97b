"""`draftwood chat`: one question to a gateway, or to a private stack where none runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from click.core import ParameterSource

from draftwood.cli.console import err, out
from draftwood.cli.gateway_client import Answer, Figures, Question, RestClient
from draftwood.cli.options import FiniteRange, settings
from draftwood.cli.stack.launch import PRIVATE_FIELDS, private_config, private_settings, private_stack, run_stoppable
from draftwood.config import ALGORITHMS, GatewayConfig, PeerConfig, flag
from draftwood.errors import UnavailableError
from draftwood.security.auth_tokens import read_tokens

DEFAULT_URL = f"http://{GatewayConfig.host}:{GatewayConfig.port}/v1"


def _not_empty(_context: click.Context, argument: click.Parameter, value: str) -> str:
    if not value.strip():
        raise click.BadParameter("the question is empty", param=argument)
    return value


@click.command()
@click.argument("question", callback=_not_empty)
@click.option(
    "--url",
    help=f"Address of the API. Without it, {DEFAULT_URL}, or services of this command's own where nothing answers.",
)
@settings(PeerConfig, only=("tls_ca",))
@click.option("--api-key-file", default="", help="File with the API key to send; of several lines the first.")
@click.option("--system", help="System message.")
@click.option(
    "--temperature",
    type=FiniteRange(0),
    help="0 is greedy; above, tokens are drawn; without it, the gateway's default of 1.",
)
@click.option("--seed", type=int, help="Seed of the draws: the same seed gives the same text, whatever is drafted.")
@click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True, help="Longest answer in tokens.")
@click.option("--algorithm", type=click.Choice(ALGORITHMS), help="How candidates are proposed for this question.")
@click.option("--tree-budget", type=int, help="Nodes of a tree without the root, for this question.")
@private_settings(compile=False)
def chat(question: str, url: str | None, tls_ca: str, api_key_file: str, **values: Any) -> None:
    """Ask one question and stream the answer.

    The answer's speed follows on standard error. With no gateway running, the three services are started for this one
    question on free ports; the model options below are for them. They do not compile by default, which pays only after
    many questions.

    \b
    Examples:
      draftwood chat "What are the benefits of walking?"
      draftwood chat --temperature 0.7 --seed 1 "Write a short story about a lamp."
      draftwood chat --url http://10.0.0.8:8000/v1 --algorithm none "Why is sleep important?"
      draftwood chat --url https://llm.example:8000/v1 --tls-ca ca.pem --api-key-file key "Why is sleep important?"
    """
    stack_values = {name: values.pop(name) for name in PRIVATE_FIELDS}
    source = click.get_current_context().get_parameter_source
    ignored = [flag(name) for name in PRIVATE_FIELDS if source(name) is ParameterSource.COMMANDLINE]
    key = read_tokens(api_key_file, "--api-key-file")[0] if api_key_file else ""
    client = RestClient(url or DEFAULT_URL, authorities=tls_ca, key=key)
    run_stoppable(_chat(Question(text=question, **values), url, client, stack_values, ignored))


async def _chat(
    question: Question, url: str | None, client: RestClient, stack_values: dict[str, Any], ignored: Sequence[str]
) -> None:
    try:
        await ask(client, question, ignored)
        return
    except UnavailableError:
        if url is not None:
            raise
    err.print(
        f"No gateway answers at {DEFAULT_URL}; starting services for this question (`draftwood up` keeps them).",
        markup=False,
    )
    async with private_stack(private_config(stack_values)) as stack:
        await ask(RestClient(stack.url), question)


async def ask(client: RestClient, question: Question, ignored: Sequence[str] = ()) -> Answer:
    """Streams the answer to standard output and its figures to standard error; names options that a running gateway
    has no use for."""
    async with client:
        model = await client.model()
        if ignored:
            err.print(
                f"warning: {', '.join(ignored)} ignored: a gateway answers at {client.url}",
                markup=False,
                soft_wrap=True,
            )
        answer = await stream_to_console(client, question, model)
    err.print(summary(answer.figures), style="dim", markup=False)
    return answer


async def stream_to_console(client: RestClient, question: Question, model: str) -> Answer:
    """Prints the pieces as they arrive."""
    answer: Answer | None = None
    async for event in client.stream(question, model):
        if isinstance(event, Answer):
            answer = event
        else:
            out.print(event, end="", markup=False, emoji=False, soft_wrap=True)
    out.print()
    assert answer is not None, "a stream ends with the whole answer"
    return answer


def summary(figures: Figures) -> str:
    """An answer's figures on a line or two."""
    parts = [
        f"{figures.num_tokens} tokens",
        f"{figures.tokens_per_s:.1f} tokens/s",
        f"{figures.steps} steps",
        f"{figures.tokens_per_step:.2f} tokens per step",
    ]
    if figures.drafted:
        parts.append(f"{figures.accepted} of {figures.drafted} draft tokens accepted ({figures.acceptance:.0%})")
    if figures.fallback_steps:
        parts.append(f"{figures.fallback_steps} steps had to do without a draft")
    return ", ".join([*parts, f"seed {figures.seed}"])

"""From option values to a stack, and private stacks that commands start for themselves."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from typing import Any, TypeVar

import click
import uvloop
from rich.markup import escape

from draftwood.cli.console import err
from draftwood.cli.options import build, settings
from draftwood.cli.stack.stack import NO_DRAFTER, RESTART_DELAYS_S, Stack, StackConfig
from draftwood.config import DraftConfig, GatewayConfig, ModelConfig, VerifyConfig

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
Value = TypeVar("Value")

MODEL_FIELDS = frozenset(spec.name for spec in fields(ModelConfig))
_PRIVATE = ("target", "draft", "random_weights", "dtype", "device", "threads", "compile")
PRIVATE_FIELDS = (*_PRIVATE, "draft_threads")  # what `private_settings` adds

draft_threads = click.option(
    "--draft-threads",
    type=click.IntRange(0, 1024),
    default=0,
    help="CPU threads of the drafter alone; 0 takes --threads.",
)


def private_settings(**defaults: Any) -> Callable[[AnyFunction], AnyFunction]:
    """The options of commands that start a stack for themselves."""

    def decorate(function: AnyFunction) -> AnyFunction:
        return settings(ModelConfig, only=_PRIVATE, defaults=defaults)(draft_threads(function))

    return decorate


def stack_config(values: Mapping[str, Any]) -> StackConfig:
    """A stack from the option values of `draftwood up`, or a part of them; what is missing keeps its default.

    `port`, `verify_port` and `draft_port` are the ports, `host` is the gateway's: the other two are reached by the
    gateway alone and listen on the loopback address. `metrics_port` is the gateway's, and the next two are theirs.
    """
    common = {name: value for name, value in values.items() if name not in ("host", "port")}
    drafted = values.get("draft") != NO_DRAFTER
    metrics_port = values.get("metrics_port") or 0
    metrics_ports = (metrics_port + 1, metrics_port + 2) if metrics_port else (0, 0)
    gateway = build(GatewayConfig, values)
    verify = build(VerifyConfig, common, port=values["verify_port"], metrics_port=metrics_ports[0])
    if not drafted:
        return StackConfig(draft=None, verify=verify, gateway=gateway)
    draft = build(DraftConfig, common, port=values["draft_port"], metrics_port=metrics_ports[1])
    return StackConfig(
        draft=replace(draft, threads=values.get("draft_threads") or draft.threads), verify=verify, gateway=gateway
    )


def private_config(values: Mapping[str, Any], **more: Any) -> StackConfig:
    """A stack on free ports of the loopback address."""
    return stack_config({**values, **more, "port": 0, "verify_port": 0, "draft_port": 0})


def run_stoppable(work: Coroutine[Any, Any, Value]) -> Value:
    """Runs a command with a private stack. SIGTERM and Ctrl-C leave it through its clean-up."""
    stopped_by: list[signal.Signals] = []

    async def stoppable() -> Value:
        task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()

        def stop(number: signal.Signals) -> None:
            stopped_by.append(number)
            task.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)
        return await task

    try:
        return uvloop.run(stoppable())
    except asyncio.CancelledError:
        if stopped_by[:1] == [signal.SIGINT]:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + signal.SIGTERM) from None


@asynccontextmanager
async def private_stack(
    config: StackConfig, *, restart_delays_s: Sequence[float] = RESTART_DELAYS_S
) -> AsyncGenerator[Stack]:
    """A running stack for one command, stopped afterwards. A spinner shows what is waited for, or without a terminal
    one line for each."""
    with err.status("Starting the services…") as status:

        def notify(name: str, text: str) -> None:
            if err.is_terminal:
                status.update(f"Starting the services… {name}: {escape(text)}")
            else:
                err.print(f"{name}: {text}", markup=False, soft_wrap=True)

        def on_line(name: str, line: str) -> None:
            _, found, what = line.partition("compiling ")  # the wait that nobody expects
            if found:
                notify(name, found + what)

        async with Stack(config, notify=notify, on_line=on_line, restart_delays_s=restart_delays_s) as stack:
            await stack.start()
            status.stop()
            yield stack

"""`draftwood up`: the three services under one roof."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import click
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from draftwood.cli.console import err, out
from draftwood.cli.example import first_question
from draftwood.cli.options import settings
from draftwood.cli.stack.drafter import require_drafter
from draftwood.cli.stack.launch import MODEL_FIELDS, draft_threads, stack_config
from draftwood.cli.stack.process import ServiceDiedError
from draftwood.cli.stack.stack import NO_DRAFTER, Stack, StackConfig
from draftwood.config import DraftConfig, GatewayConfig, ModelConfig, VerifyConfig
from draftwood.errors import UnavailableError
from draftwood.security.security import Security

_DEATH_IS_NOTICED_S = 2.0

PORT = click.IntRange(0, 65535)
_OWN = MODEL_FIELDS | {"host", "port", "drafter", "verify", "target"}


@click.command()
@click.option(
    "--host",
    default=GatewayConfig.host,
    show_default=True,
    help="Address that the gateway listens on; the other two listen on the loopback address.",
)
@click.option(
    "--port", type=PORT, default=GatewayConfig.port, show_default=True, help="Port of the gateway; 0 picks a free one."
)
@click.option(
    "--verify-port",
    type=PORT,
    default=VerifyConfig.port,
    show_default=True,
    help="Port of the verify service; 0 picks a free one.",
)
@click.option(
    "--draft-port",
    type=PORT,
    default=DraftConfig.port,
    show_default=True,
    help="Port of the draft service; 0 picks a free one.",
)
@settings(ModelConfig, skip=("host", "metrics_port"))
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65533),
    default=GatewayConfig.metrics_port,
    show_default=True,
    help="Port of the gateway's Prometheus endpoint; the verify service's is the next, the draft service's the one "
    "after that; 0 opens none.",
)
@click.option("--no-draft", is_flag=True, help="Run without a drafter; the same as --draft none.")
@draft_threads
@settings(DraftConfig, skip=_OWN)
@settings(VerifyConfig, skip=_OWN)
@settings(GatewayConfig, skip=(*_OWN, "drain_timeout_s"))
def up(*, no_draft: bool, **values: Any) -> None:
    """Start all three services and keep them running.

    One line for each service says when it is ready. A drafter that dies is started again while the others go on; when
    the verify service or the gateway dies, everything is stopped and the exit code is 1. Ctrl-C and SIGTERM stop
    everything in order; a second Ctrl-C kills. No service outlives this command, not even when it is killed.

    \b
    Examples:
      draftwood up
      draftwood up --target ~/models/Qwen3-8B --draft ~/models/Qwen3-8B-DFlash-b16
      draftwood up --algorithm dflash --tree-budget 15 --port 9000
      draftwood up --no-draft
    """
    if no_draft:
        values["draft"] = NO_DRAFTER
    raise SystemExit(asyncio.run(run(stack_config(values))))


async def run(config: StackConfig) -> int:
    """Runs a stack until a signal or a death; the exit code."""
    progress = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=err, transient=True
    )
    stack = Stack(config, on_line=_echo, notify=_Announcer(progress))
    err.print(f"starting {', '.join(stack.names)}", markup=False)
    work = asyncio.create_task(_serve(stack, progress))
    interrupted = _stop_on_signals(stack, work)
    try:
        failure = await work
    except asyncio.CancelledError:
        failure = None
    except ServiceDiedError as error:
        failure = error
    except UnavailableError as error:
        failure = await _death_behind(error, stack)
    finally:
        progress.stop()
        if interrupted.is_set():
            err.print("stopping: gateway, verify, draft")
        await stack.stop()
    if failure is None:
        return 0
    err.print(f"[red]error:[/red] {escape(failure.message)}", soft_wrap=True)
    return 1


async def _serve(stack: Stack, progress: Progress) -> ServiceDiedError:
    with progress:
        await stack.start()
        if stack.config.draft is not None:
            await require_drafter(stack.verify_address, Security.load(stack.config.verify))
    if stack.config.gateway is not None:
        example = first_question(stack.config.gateway, stack.url)
        out.print(f"\n{example}\nCtrl-C stops everything.", markup=False, soft_wrap=True)
    return await stack.supervise()


async def _death_behind(error: UnavailableError, stack: Stack) -> UnavailableError | ServiceDiedError:
    """A service that dies is seen to be unreachable first; its last words say more."""
    try:
        return await asyncio.wait_for(stack.supervise(), _DEATH_IS_NOTICED_S)
    except TimeoutError:
        return error


def _stop_on_signals(stack: Stack, work: asyncio.Task[ServiceDiedError]) -> asyncio.Event:
    """The first signal ends the work, a second one kills; the event says that there was one."""
    loop, interrupted = asyncio.get_running_loop(), asyncio.Event()

    def on_signal() -> None:
        if interrupted.is_set():
            stack.kill()
        interrupted.set()
        work.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    return interrupted


class _Announcer:
    """Readiness goes to standard output as a line of its own; what else happens to a service, to standard error."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._rows: dict[str, Any] = {}

    def __call__(self, name: str, text: str) -> None:
        if text == "starting":
            self._rows[name] = self._progress.add_task(f"{name} is starting")
            return
        if name in self._rows:
            self._progress.remove_task(self._rows.pop(name))
        if text.startswith("ready on "):
            out.print(f"{name} {text}", markup=False, soft_wrap=True)
        else:
            err.print(f"[yellow]{name}:[/yellow] {escape(text)}", soft_wrap=True)


def _echo(name: str, line: str) -> None:
    err.print(f"[dim]{name} |[/dim] {escape(line)}", soft_wrap=True)

"""A service as a process: from flags to an exit code, what it says when it is ready, and which signals stop it."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from draftwood.config import Config
from draftwood.errors import DraftwoodError
from draftwood.garbage import freeze_startup

C = TypeVar("C", bound=Config)
S = TypeVar("S")


def run(
    config_type: type[C],
    args: list[str],
    *,
    prog: str,
    build: Callable[[C], S],
    serve: Callable[[C, S], Coroutine[Any, Any, None]],
) -> int:
    """Reads the flags, builds the service, and serves until it is told to stop. The exit code: 0 after a clean stop, 2
    for a setting or a model that cannot be served."""
    config = config_type.from_args(args, prog=prog)
    try:
        uvloop.run(serve(config, build(config)))
    except DraftwoodError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 2
    return 0


def say_ready(text: str) -> None:
    """One line on standard output, once requests are taken. What is alive by now stays for as long as the process."""
    freeze_startup()
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def stop_on_signals(on_another: Callable[[], object] = lambda: None) -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets; `on_another` is called for each one after it."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()

    def on_signal() -> None:
        if stopped.is_set():
            on_another()
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stopped

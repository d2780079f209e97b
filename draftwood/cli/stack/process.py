"""One service as a child process: started, waited for until it is ready, stopped; its output is read all the while."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from draftwood.errors import UnavailableError

LAUNCHER = Path(__file__).with_name("launcher.py")
STOP_GRACE_S = 10.0  # beside the time that a service lets requests go on for
_READY = re.compile(r" ready on (?:https?://)?(?P<address>[^\s/]+:\d+)")
_TAIL_LINES = 20
# What Triton's bindings report after an exception that ends a process, dozens of lines behind the one that matters.
_LEAKS = re.compile(r"nanobind: |\s*- (?:leaked |\.\.\. skipped remainder)|\s*See https://nanobind\.")
_MAX_LINE_BYTES = 1 << 20

LineSink = Callable[[str, str], None]  # service name, line


class ServiceDiedError(UnavailableError):
    """A service ended by itself, or did not become ready."""

    def __init__(self, name: str, what: str, last_lines: Sequence[str]) -> None:
        tail = "".join(f"\n  {line}" for line in last_lines)
        super().__init__(f"the {name} service {what}" + (f"; its last lines:{tail}" if tail else ""))
        self.name = name


class ServiceProcess:
    """A child `python -m MODULE ARGS`. It leads a process group of its own, so that Ctrl-C reaches only the parent."""

    def __init__(
        self, name: str, args: Sequence[str], environment: Mapping[str, str], on_line: LineSink | None = None
    ) -> None:
        self.name = name
        self.args = list(args)
        self._environment = environment
        self._on_line = on_line
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._ready: asyncio.Future[str] | None = None
        self._watch: asyncio.Task[int] | None = None

    @property
    def command(self) -> list[str]:
        """What runs once the launcher has set the death signal; -P keeps the working directory's modules out."""
        return [sys.executable, "-P", "-m", *self.args]

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self.is_running and self._process is not None else None

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._watch is not None and not self._watch.done()

    @property
    def last_lines(self) -> list[str]:
        """The end of its standard error."""
        return list(self._tail)

    async def start(self) -> None:
        """Starts the process; a process that ended may be started again. Call it from the main thread."""
        self._tail.clear()
        self._ready = asyncio.get_running_loop().create_future()
        # Pipes of our own: asyncio would see the process's end only once its helpers have closed theirs too.
        output, output_end = await _open_pipe()
        errors, errors_end = await _open_pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *launch_command(self.command), stdin=asyncio.subprocess.DEVNULL, stdout=output_end, stderr=errors_end,
                env=dict(self._environment), start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(output_end)
            os.close(errors_end)
        self._watch = asyncio.create_task(self._until_exit(self._process, output, errors))

    async def ready(self, timeout_s: float) -> str:
        """The address of its readiness line. Raises ServiceDiedError if it ends, or is not ready in time."""
        assert self._ready is not None, "not started"
        assert self._watch is not None, "not started"
        ready, watch = self._ready, self._watch
        await asyncio.wait((ready, watch), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if watch.done():
            raise self.death()
        if not ready.done():
            raise ServiceDiedError(self.name, f"is not ready after {timeout_s:g} s", self.last_lines)
        return ready.result()

    async def exited(self) -> int:
        """Waits for the end; the exit code, negative for a signal."""
        assert self._watch is not None, "not started"
        return await asyncio.shield(self._watch)

    def death(self) -> ServiceDiedError:
        """The end of the process as an error."""
        assert self._watch is not None, "not started"
        return ServiceDiedError(self.name, describe_exit(self._watch.result()), self.last_lines)

    async def stop(self, grace_s: float) -> None:
        """Asks it to end and waits; kills it after `grace_s`. Does nothing where it does not run."""
        if not self.is_running or self._process is None or self._watch is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        await asyncio.wait((self._watch,), timeout=grace_s)
        self.kill()
        await asyncio.shield(self._watch)

    def kill(self) -> None:
        """Kills it and whatever it started, without waiting."""
        if self.is_running and self._process is not None:
            _kill_group(self._process.pid)

    async def _until_exit(
        self, process: asyncio.subprocess.Process, output: asyncio.StreamReader, errors: asyncio.StreamReader
    ) -> int:
        assert self._ready is not None, "set before the process is started"
        readers = (
            asyncio.create_task(self._read_output(output, self._ready)),
            asyncio.create_task(self._read_errors(errors)),
        )
        code = await process.wait()
        _kill_group(process.pid)  # helpers that it left behind; they hold the pipes open
        await asyncio.gather(*readers)
        return code

    async def _read_output(self, stream: asyncio.StreamReader, ready: asyncio.Future[str]) -> None:
        async for line in _lines(stream):
            match = _READY.search(line)
            if match and not ready.done():
                ready.set_result(match["address"])
            elif self._on_line is not None:
                self._on_line(self.name, line)

    async def _read_errors(self, stream: asyncio.StreamReader) -> None:
        async for line in _lines(stream):
            if _LEAKS.match(line):
                continue
            self._tail.append(line)
            if self._on_line is not None:
                self._on_line(self.name, line)


def launch_command(command: Sequence[str]) -> list[str]:
    """The command, killed by the kernel when this process dies."""
    return [sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid()), *command]


async def _open_pipe() -> tuple[asyncio.StreamReader, int]:
    """A reader, and the descriptor to write to."""
    read_end, write_end = os.pipe()
    reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0)
    )
    return reader, write_end


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Decoded lines without their end; a line longer than the buffer is dropped."""
    while True:
        try:
            line = await stream.readline()
        except ValueError:
            continue
        if not line:
            return
        yield line.decode(errors="replace").rstrip("\n")


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by {signal.Signals(-code).name}"

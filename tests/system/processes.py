"""Services as processes of their own, found by the address that each says when it is ready."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parents[2]
START_S = 100.0
READY = re.compile(r"^(?:draft service|verify service|gateway) ready on \S+:(\d+)(?:/v1)? ")
MODEL_ARGS = ["--no-compile", "--dtype", "float32", "--threads", "1"]


class Process:
    """`python -m SERVICE ARGS`, its output in a file of the test's."""

    def __init__(self, service: str, args: list[str], log: Path) -> None:
        self.log = log
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", service, *([] if service == "gateway" else MODEL_ARGS), *args]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self._ready = threading.Event()
        self.port = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if match := READY.match(line):
                    self.port = int(match[1])
                    self._ready.set()
        self._ready.set()  # ended: nobody need wait any longer

    def until_ready(self) -> Self:
        """Waits for the line that gives the port."""
        assert self._ready.wait(START_S), self.log.read_text()
        assert self.port, self.log.read_text()
        return self

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    def kill(self) -> None:
        """SIGKILL: no goodbye."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self._process.send_signal(number)

    def exit_status(self) -> int:
        """Waits for the end."""
        return self._process.wait(30)

    def stop(self) -> int:
        """SIGTERM; the exit status. Killed where it does not end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(30)
        finally:
            self.kill()


def free_port() -> int:
    """A port that is free now, for services that must come back at the same address."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

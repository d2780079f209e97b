"""Ctrl-C before a service serves: it ends at once, with one line. Imports, loading and compiling take from seconds to
minutes, hold nothing that would have to end well, and would answer with a traceback."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

STATUS = 128 + signal.SIGINT


def end_on_interrupt(name: str) -> None:
    """From now on; a service that serves puts its own handler in place of this one."""

    def end(_number: int, _frame: object) -> NoReturn:
        os.write(2, f"{name} interrupted before it was ready\n".encode())
        os._exit(STATUS)  # a compiler's helpers end with their pipes

    signal.signal(signal.SIGINT, end)

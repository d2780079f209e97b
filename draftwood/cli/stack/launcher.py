"""Runs a command that the kernel kills when the process that started it dies, however it dies.

    python -I -S launcher.py PARENT_PID COMMAND...

A script of its own because code between fork and exec may deadlock in a process with gRPC's threads. The death signal
survives the exec. It is sent when the *thread* that started the command ends, so services are started from the main
thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Sets the death signal, checks that the parent is still there, and becomes the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call above
            sys.exit(1)
    os.execv(command[0], command)


main()

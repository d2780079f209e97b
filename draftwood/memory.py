"""What this process and this machine have of memory, and how a service says what it will hold."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from draftwood.config import Config
from draftwood.errors import DraftwoodError

AnyConfig = TypeVar("AnyConfig", bound=Config)


def resident_memory_bytes() -> int:
    """Resident memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak_memory_bytes() -> int:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def physical_memory_bytes() -> int:
    """What this machine, or the control group that the process is in, has in all."""
    total = os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such group, or one without a limit, which says "max"
        return total


def print_plan(plan: Callable[[AnyConfig], Mapping[str, int]], config: type[AnyConfig], prog: str) -> int:
    """Prints the plan for this process's flags as JSON: bytes by what holds them. The exit code: 2 for a setting or
    model that cannot be served, which goes to standard error."""
    try:
        sys.stdout.write(json.dumps(plan(config.from_args(sys.argv[1:], prog=prog))) + "\n")
    except DraftwoodError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 2
    return 0

"""What a measurement depends on besides the code: processor, cores, versions, commit, and the memory that was used."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

import draftwood

PACKAGES = ("torch", "transformers", "grpcio", "numpy")


def processor() -> str:
    """Model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def versions() -> dict[str, str]:
    """Versions of Python, this project and what speed depends on."""
    found = {"python": platform.python_version(), "draftwood": draftwood.__version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def commit() -> str:
    """The checkout's commit, with a + where files differ from it; empty outside a checkout."""
    folder = Path(draftwood.__file__).parent.parent

    def git(*args: str) -> str:
        run = subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, check=False)
        return run.stdout.strip() if run.returncode == 0 else ""

    try:
        head = git("rev-parse", "HEAD")
        return head + "+" if head and git("status", "--porcelain") else head
    except OSError:
        return ""


def resident_memory_bytes(pid: int) -> int:
    """A process's resident memory now; 0 where it ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def peak_memory_bytes(pids: Iterable[int]) -> int:
    """Sum of the processes' peak resident memories; processes that ended count nothing."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return total

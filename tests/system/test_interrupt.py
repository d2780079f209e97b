"""Ctrl-C while a service starts: one line and exit code 130, whatever it is busy with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.processes import ROOT

NAMES = {"verify_service": "verify service", "draft_service": "draft service", "gateway": "gateway"}


def started(*args: str) -> subprocess.Popen[str]:
    command = [sys.executable, *args, "--port", "0"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> list[str]:
    """What it says from now on, without its imports."""
    output, errors = process.communicate(timeout=60)
    assert output == ""
    return [line for line in errors.splitlines() if not line.startswith("import time:")]


@pytest.mark.parametrize("service", NAMES)
def test_while_it_imports(service: str) -> None:
    process = started("-X", "importtime", "-m", service)
    assert process.stderr is not None
    assert any(line.rstrip().endswith("| asyncio") or " grpc" in line for line in process.stderr), "ended by itself"
    process.send_signal(signal.SIGINT)
    assert said(process) == [f"{NAMES[service]} interrupted before it was ready"]
    assert process.returncode == 130


@pytest.mark.parametrize("service", NAMES)
def test_while_it_reads_its_files(service: str, tmp_path: Path) -> None:
    """A file that does not end: reading it begins, and waits."""
    flag = "--api-key-file" if service == "gateway" else "--token-file"
    os.mkfifo(tmp_path / "secret")
    process = started("-m", service, flag, str(tmp_path / "secret"))
    with (tmp_path / "secret").open("w"):  # once the service has opened it
        process.send_signal(signal.SIGINT)
        assert said(process) == [f"{NAMES[service]} interrupted before it was ready"]
    assert process.returncode == 130

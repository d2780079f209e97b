"""`draftwood up` as a process: signals, deaths, orphans. The services are stand-ins."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import IO

import pytest

from tests.draftwood.cli.fake_services import FakeServices, is_alive

PORTS = ["--port", "0", "--verify-port", "0", "--draft-port", "0"]
READY = "Ctrl-C stops everything."

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(fakes: FakeServices) -> Iterator[Start]:
    """Runs `draftwood up` with stand-ins that behave as told."""
    running: list[subprocess.Popen[str]] = []

    def run(*args: str, status: str = "ready", **behaviours: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "draftwood.cli", "up", *(args or PORTS)], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=fakes.environment(**behaviours) | {"FAKE_STATUS": status},
        )  # fmt: skip
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.communicate()


def read_until(stream: IO[str] | None, text: str) -> list[str]:
    assert stream is not None
    lines: list[str] = []
    for line in stream:
        lines.append(line.rstrip("\n"))
        if text in line:
            return lines
    raise AssertionError(f"{text!r} is not in {lines}")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_in_order(start: Start, fakes: FakeServices, number: signal.Signals) -> None:
    process = start()
    lines = read_until(process.stdout, READY)
    assert [line.split(" ready on ")[0] for line in lines if " ready on " in line][-1] == "gateway"
    assert sum(" ready on " in line for line in lines) == 3
    assert any("curl -N http://127.0.0.1:" in line and '"max_tokens": 64' in line for line in lines)
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0, errors
    assert errors.startswith("starting draft, verify, gateway\n")
    assert [note.split()[0] for note in fakes.notes() if note.endswith("stopped")] == [
        "gateway",
        "verify_service",
        "draft_service",
    ]


def test_a_second_signal_kills(start: Start, fakes: FakeServices) -> None:
    process = start(gateway="stubborn")
    read_until(process.stdout, READY)
    process.send_signal(signal.SIGINT)
    read_until(process.stderr, "stopping")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=5)
    assert not any(is_alive(pid) for pid in fakes.started())


def test_no_service_outlives_a_killed_parent(start: Start, fakes: FakeServices) -> None:
    process = start()
    read_until(process.stdout, READY)
    pids = fakes.started()
    assert len(pids) == 3
    process.kill()
    process.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "orphans are left")


@pytest.mark.parametrize("name", ["verify_service", "gateway"])
def test_a_death_stops_everything_with_its_last_words(start: Start, fakes: FakeServices, name: str) -> None:
    process = start(**{name: "die"})
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert f"error: the {name.removesuffix('_service')} service ended with exit code 3" in errors
    assert "something broke" in errors.split("its last lines:")[1]
    assert not any(is_alive(pid) for pid in fakes.started())


@pytest.mark.parametrize("verify_service", ["", "silent"])
def test_a_drafter_that_refuses_its_model_stops_everything(
    start: Start, fakes: FakeServices, verify_service: str
) -> None:
    """Also before the others are there."""
    process = start(draft_service="refuse", verify_service=verify_service)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "hidden size 64 differs from the target's 384" in errors
    assert "the others go on" not in errors
    assert "Traceback" not in errors
    assert not any(is_alive(pid) for pid in fakes.started())


def test_a_drafter_that_the_verify_service_refuses_stops_everything(start: Start) -> None:
    process = start(status="mismatch: block size 16 is not 8")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "does not use a drafter: mismatch: block size 16 is not 8" in errors


def test_a_drafter_that_dies_later_is_started_again(start: Start, fakes: FakeServices) -> None:
    process = start(draft_service="die on request")
    read_until(process.stdout, READY)
    (fakes.folder / "die").touch()
    errors = read_until(process.stderr, "the others go on")
    assert any("the draft service ended with exit code 3" in line for line in errors)
    read_until(process.stdout, "draft ready on ")
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 0


def test_without_a_drafter(start: Start) -> None:
    process = start(*PORTS, "--no-draft")
    lines = read_until(process.stdout, READY)
    assert not any(line.startswith("draft ready") for line in lines)
    process.terminate()
    process.communicate(timeout=20)


def test_a_taken_port_is_an_error_at_once(start: Start, fakes: FakeServices) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        process = start("--port", str(listener.getsockname()[1]), "--draft-port", "0", "--verify-port", "0")
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert errors.startswith("error: --port ")
    assert fakes.notes() == []


def test_a_bad_setting_is_an_error_at_once(start: Start, fakes: FakeServices) -> None:
    process = start("--tree-budget", "1000")
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert errors == "error: --tree-budget is 1000, not in [0, 63]\n"
    assert fakes.notes() == []


def test_the_launcher_gives_up_where_the_parent_is_gone() -> None:
    from draftwood.cli.stack.process import LAUNCHER

    command = [sys.executable, "-I", "-S", str(LAUNCHER), "1", sys.executable, "-c", "print('ran')"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (1, "")
    command[4] = str(os.getpid())
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "ran\n"

"""Commands that start services for themselves stop them however they end. The services are stand-ins."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from tests.draftwood.cli.fake_services import FakeServices, is_alive


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_services(fakes: FakeServices, number: signal.Signals, code: int) -> None:
    environment = fakes.environment(gateway="silent")
    process = subprocess.Popen(
        [sys.executable, "-m", "draftwood.cli", "demo"], env=environment, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 10
    while len(fakes.started()) < 3:
        assert time.monotonic() < deadline, "the services do not start"
        time.sleep(0.02)
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    assert "verify: starting\n" in errors, "without a terminal each wait is a line"
    assert "gateway: compiling 1 of 4: one request, a lone token\n" in errors
    assert [note.split()[0] for note in fakes.notes() if note.endswith("stopped")] == [
        "gateway",
        "verify_service",
        "draft_service",
    ]


def test_a_service_that_cannot_start_is_one_line_of_error(fakes: FakeServices) -> None:
    command = [sys.executable, "-m", "draftwood.cli", "bench", "decode", "--limit", "1"]
    environment = fakes.environment(draft_service="refuse")
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "error: the draft service ended with exit code 2" in result.stderr
    assert "hidden size 64 differs" in result.stderr
    assert "Traceback" not in result.stderr
    assert not any(is_alive(pid) for pid in fakes.started())

"""The systemd units: well-formed, sealed off, and the drafter is wanted but not required."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from draftwood.cli import COMMANDS
from tests.deploy.compose import DEPLOY

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
NAMES = ("draft", "gateway", "verify")
TOOL = shutil.which("systemd-analyze")
needs_tool = pytest.mark.skipif(TOOL is None, reason="systemd-analyze is not installed")
MAX_EXPOSURE = 25  # tenths; systemd calls 2.5 "OK" and a service that is not sealed off, 9.6, "UNSAFE"


def read(name: str) -> configparser.ConfigParser:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    unit.read(DEPLOY / "systemd" / f"draftwood-{name}.service")
    return unit


def installed(folder: Path) -> list[str]:
    """The units with a program that exists here in the place of the installed one."""
    for path in UNITS:
        text = path.read_text()
        assert "ExecStart=/opt/draftwood/bin/draftwood " in text
        (folder / path.name).write_text(text.replace("/opt/draftwood/bin/draftwood", sys.executable))
    return [str(folder / path.name) for path in UNITS]


def test_there_is_one_for_each_service() -> None:
    assert [path.stem for path in UNITS] == [f"draftwood-{name}" for name in NAMES]
    for name in NAMES:
        assert name in COMMANDS
        assert read(name)["Service"]["ExecStart"] == f"/opt/draftwood/bin/draftwood {name} $FLAGS"
        assert read(name)["Service"]["EnvironmentFile"] == f"-/etc/draftwood/{name}.env"


@needs_tool
def test_systemd_finds_no_fault(tmp_path: Path) -> None:
    units = installed(tmp_path)
    result = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    ours = [line for line in result.stderr.splitlines() if "draftwood" in line]
    assert (result.returncode, ours) == (0, [])
    broken = Path(units[0])
    broken.write_text(broken.read_text().replace("KillSignal=SIGTERM", "KillSignal=SIGNONE"))
    result = subprocess.run(["systemd-analyze", "verify", str(broken)], capture_output=True, text=True, check=False)
    assert "SIGNONE" in result.stderr


@needs_tool
def test_services_are_sealed_off(tmp_path: Path) -> None:
    arguments = ["security", "--offline=true", f"--threshold={MAX_EXPOSURE}", "--no-pager"]
    for unit in installed(tmp_path):
        result = subprocess.run(["systemd-analyze", *arguments, unit], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout[-200:]


def test_the_drafter_is_wanted_and_not_required() -> None:
    for name in NAMES:
        unit = read(name)["Unit"]
        assert not {"Requires", "Requisite", "BindsTo", "PartOf"} & set(unit)
    assert "draftwood-draft.service" in read("verify")["Unit"]["Wants"].split()
    # What is started later is stopped earlier: the gateway lets answers end while the verify service still runs.
    assert "draftwood-verify.service" in read("gateway")["Unit"]["After"].split()


def test_stops_are_waited_for() -> None:
    for name, seconds in (("draft", 15), ("gateway", 30), ("verify", 60)):
        service = read(name)["Service"]
        assert (service["KillSignal"], service["TimeoutStopSec"]) == ("SIGTERM", str(seconds))
        assert service["RestartPreventExitStatus"] == "2"  # a wrong setting does not get better

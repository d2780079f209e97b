"""Tests of kernels in Triton's interpreter, each file in a process of its own (conftest.py says why)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FILES = sorted(
    path.name for path in FOLDER.glob("test_*.py") if path.name not in ("test_compiled.py", Path(__file__).name)
)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.timeout(300)
def test_in_interpreter(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(FOLDER / name)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    result = subprocess.run(
        command,
        cwd=FOLDER.parent.parent,
        env=environment | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr

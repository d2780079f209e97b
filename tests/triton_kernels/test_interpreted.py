"""Tests of kernels in Triton's interpreter, in processes of their own (conftest.py says why)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FILES = sorted(
    path.name for path in FOLDER.glob("test_*.py") if path.name not in ("test_compiled.py", Path(__file__).name)
)
SHARES = [FILES[i::3] for i in range(3)]  # few processes, as each imports torch; several, as there are two workers


@pytest.mark.parametrize("names", SHARES, ids=" ".join)
@pytest.mark.timeout(600)
def test_in_interpreter(names: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *(str(FOLDER / n) for n in names)]
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

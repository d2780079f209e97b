"""Tests of kernels in Triton's interpreter, in processes of their own (tests/support/triton_hooks.py says why)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("tests/verify_service/kernels/triton", "tests/draft_service/kernels/triton")
FILES = sorted(str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).glob("test_*.py"))
SHARES = [FILES[i::3] for i in range(3)]  # few processes, as each imports torch; several, as there are two workers


@pytest.mark.parametrize("names", SHARES, ids=lambda names: " ".join(Path(name).stem for name in names))
@pytest.mark.timeout(600)
def test_in_interpreter(names: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *names]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=environment | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr

"""The draft service as a process that is told to stop before it serves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from draftwood.checkpoint import EMBEDDED_DRAFT
from tests.system.processes import ROOT


def test_sigterm_while_it_loads_ends_it_at_once(tmp_path: Path) -> None:
    """A file that does not end: reading it begins, on the thread that will run the model, and waits."""
    shutil.copy(EMBEDDED_DRAFT / "config.json", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": "weights"}}))
    os.mkfifo(tmp_path / "weights")
    command = [sys.executable, "-m", "draft_service", "--port", "0", "--draft", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with (tmp_path / "weights").open("w"):  # once the service has opened it
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (0, "", "")

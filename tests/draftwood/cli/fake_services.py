"""Stand-ins for the three services: packages in a folder that children find before the real ones."""

from __future__ import annotations

import os
from pathlib import Path

from draftwood.cli.stack.environment import service_environment

FAKE = """
import os, pathlib, signal, subprocess, sys, time

name = pathlib.Path(__file__).parent.name
folder = pathlib.Path(os.environ["FAKE_FOLDER"])
port = sys.argv[sys.argv.index("--port") + 1] if "--port" in sys.argv else "1"

def note(text):
    with (folder / "notes").open("a") as notes:
        notes.write(f"{name} {text}\\n")

def stop(*_):
    note("stopped")
    raise SystemExit(0)

behaviour = os.environ.get(f"FAKE_{name.upper()}", "")
signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "stubborn" else stop)
if behaviour == "silent":
    print("2026-01-01 INFO compiling 1 of 4: one request, a lone token", file=sys.stderr, flush=True)
note(f"started {os.getpid()} {' '.join(sys.argv[1:])}")
if behaviour == "refuse":
    print("error: --draft tiny: hidden size 64 differs from the target's 384", file=sys.stderr)
    raise SystemExit(2)
if behaviour == "child":
    note(f"child {subprocess.Popen(['sleep', '60']).pid}")
if name == "verify_service" and "FAKE_STATUS" in os.environ:
    from concurrent.futures import ThreadPoolExecutor

    import grpc
    from draftwood.v1 import verify_pb2, verify_pb2_grpc

    class Verify(verify_pb2_grpc.VerifyServiceServicer):
        def GetTargetModel(self, request, context):
            return verify_pb2.GetTargetModelResponse(drafter_status=os.environ["FAKE_STATUS"])

    server = grpc.server(ThreadPoolExecutor(1))
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(Verify(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
if behaviour == "silent":
    time.sleep(60)
address = f"http://127.0.0.1:{port}/v1" if name == "gateway" else f"127.0.0.1:{port}"
print(f"{name} ready on {address}")
if behaviour == "die":
    time.sleep(0.1)
    print("something broke", file=sys.stderr)
    for line in ("nanobind: leaked 703 functions!", *[' - leaked function "get"'] * 30):
        print(line, file=sys.stderr)
    raise SystemExit(3)
while behaviour == "die on request":
    time.sleep(0.02)
    if (folder / "die").exists():
        (folder / "die").unlink()
        raise SystemExit(3)
while True:
    time.sleep(60)
"""


class FakeServices:
    """Writes the packages and reads what they noted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("draft_service", "verify_service", "gateway"):
            package = folder / name
            package.mkdir()
            (package / "__init__.py").touch()
            (package / "__main__.py").write_text(FAKE)

    def environment(self, **behaviours: str) -> dict[str, str]:
        """Environment of a stack: `draft_service="die"` and the like say what a service does."""
        base = dict(os.environ) | {"PYTHONPATH": str(self.folder), "FAKE_FOLDER": str(self.folder)}
        base |= {f"FAKE_{name.upper()}": what for name, what in behaviours.items()}
        return service_environment(base=base)

    def notes(self) -> list[str]:
        """What the services wrote down, in order."""
        path = self.folder / "notes"
        return path.read_text().splitlines() if path.exists() else []

    def started(self) -> list[int]:
        """Process ids, of services and of what they started."""
        return [int(note.split()[2]) for note in self.notes() if note.split()[1] in ("started", "child")]


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

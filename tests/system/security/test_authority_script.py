"""deploy/make-test-authority.sh, and all three services with what it makes: TLS both ways, token, HTTPS, API key."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from draftwood.cli.stack.ports import free_port

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "deploy" / "make-test-authority.sh"
START_S = 100.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "certificates"
    subprocess.run([str(SCRIPT), str(folder), "10.0.0.7", "llm.example"], check=True, capture_output=True)
    return folder


def test_what_is_made(made: Path) -> None:
    text = subprocess.run(
        ["openssl", "x509", "-in", str(made / "verify.pem"), "-noout", "-ext", "subjectAltName"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in ("DNS:verify", "DNS:localhost", "DNS:llm.example", "IP Address:127.0.0.1", "IP Address:10.0.0.7"):
        assert name in text
    assert all(path.stat().st_mode & 0o077 == 0 for path in made.iterdir())
    check = ["openssl", "verify", "-x509_strict", "-CAfile", str(made / "ca.pem"), str(made / "draft.pem")]
    assert subprocess.run(check, capture_output=True, check=False).returncode == 0


def test_an_authority_is_not_overwritten(made: Path) -> None:
    before = (made / "ca.pem").read_bytes()
    again = subprocess.run([str(SCRIPT), str(made)], capture_output=True, text=True, check=False)
    assert (again.returncode, "holds an authority already" in again.stderr) == (1, True)
    assert (made / "ca.pem").read_bytes() == before
    assert subprocess.run([str(SCRIPT)], capture_output=True, check=False).returncode == 2


@pytest.fixture(scope="module")
def ports() -> dict[str, int]:
    return {name: free_port("127.0.0.1") for name in ("gateway", "verify", "draft")}


@pytest.fixture(scope="module")
def running(made: Path, ports: dict[str, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """`draftwood up` as docs/security.md has it."""
    log = tmp_path_factory.mktemp("log") / "up"
    arguments = [f"--port={ports['gateway']}", f"--verify-port={ports['verify']}", f"--draft-port={ports['draft']}"]
    arguments += [f"--tls-cert={made}/verify.pem", f"--tls-key={made}/verify-key.pem", f"--tls-ca={made}/ca.pem"]
    arguments += ["--tls-client-auth", f"--token-file={made}/token", f"--api-key-file={made}/api-key"]
    arguments += [f"--https-cert={made}/gateway.pem", f"--https-key={made}/gateway-key.pem"]
    arguments += ["--no-compile", "--threads=1", "--max-batch=2", "--max-context=256"]
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "draftwood.cli", "up", *arguments], cwd=ROOT,
            env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                if "Ctrl-C" in line:
                    ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    try:
        assert ready.wait(START_S), log.read_text()
        assert process.poll() is None, log.read_text()
        yield
        process.terminate()
        assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "draftwood.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_everything_serves_those_who_belong_to_it(running: None, made: Path, ports: dict[str, int]) -> None:
    trust = ssl.create_default_context(cafile=str(made / "ca.pem"))
    key = (made / "api-key").read_text().strip()
    with openai.OpenAI(
        base_url=f"https://127.0.0.1:{ports['gateway']}/v1", api_key=key, max_retries=0,
        http_client=openai.DefaultHttpxClient(verify=trust, trust_env=False),
    ) as client:  # fmt: skip
        answer = client.chat.completions.create(
            model="sprout", messages=[{"role": "user", "content": "Why?"}], max_tokens=12, temperature=0
        )
        assert answer.model_extra is not None
        assert answer.model_extra["draftwood"]["accepted"] > 0  # so the draft stream is there too
    trusted = ["--tls-ca", str(made / "ca.pem")]
    url, key_file = f"https://127.0.0.1:{ports['gateway']}", str(made / "api-key")
    chat = run("chat", "--url", url, *trusted, "--api-key-file", key_file, "--max-tokens", "8", "Why?")
    assert chat.returncode == 0, chat.stderr
    identity = [*trusted, "--tls-cert", str(made / "gateway.pem"), "--tls-key", str(made / "gateway-key.pem")]
    for name in ("verify", "draft"):
        right = run("check", f"127.0.0.1:{ports[name]}", *identity, "--token-file", str(made / "token"))
        assert (right.returncode, right.stdout) == (0, f"127.0.0.1:{ports[name]} healthy\n")


def test_nobody_else_is_served(running: None, made: Path, ports: dict[str, int], tmp_path: Path) -> None:
    trusted = ["--tls-ca", str(made / "ca.pem")]
    identity = [*trusted, "--tls-cert", str(made / "gateway.pem"), "--tls-key", str(made / "gateway-key.pem")]
    other = tmp_path / "other"
    other.write_text("a-token-of-somebody-else\n")
    refusals = {
        "the other side closed the connection at once": [],
        "misses one (--tls-cert)": [*trusted, "--token-file", str(made / "token")],
        "the service refuses calls without its token (--token-file)": identity,
        "with another token than its own": [*identity, "--token-file", str(other)],
    }
    for text, arguments in refusals.items():
        result = run("check", f"127.0.0.1:{ports['draft']}", *arguments)
        assert result.returncode == 1
        assert text in result.stdout
    result = run("chat", "--url", f"https://127.0.0.1:{ports['gateway']}", *trusted, "Why?")
    assert (result.returncode, "401: the request carries no API key" in result.stderr) == (2, True)

"""The commands and the environment of each container, CPU override, as plain processes: they serve, and say they do.

The tests of this file run in order: the drafter comes late, and all are stopped at the end.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import openai
import pytest

from draftwood.cli.stack.ports import free_port
from tests.deploy.compose import BASE, CPU, DEPLOY, load
from tests.deploy.test_dockerfile import chain

START_S = 100.0
NAMES = ("draft", "verify", "gateway")


class Container:
    """A service's process; `place` turns what holds in a container into what holds here."""

    def __init__(self, name: str, service: dict[str, Any], places: dict[str, str], log: Path) -> None:
        self.name, self._service, self._places, self._log = name, service, places, log
        image = dict(re.findall(r"(\w+)=(\S+)", " ".join(v for i, v in chain("cpu") if i == "ENV")))
        environment = {key: self.place(value) for key, value in {**image, **service["environment"]}.items()}
        # The packages that the image has in its own folder are this environment's.
        kept = {key: os.environ[key] for key in ("PATH", "PYTHONPATH") if key in os.environ}
        self._environment = environment | kept | {"OMP_NUM_THREADS": "1"}
        self._process: subprocess.Popen[str] | None = None
        self._ready = threading.Event()

    def place(self, value: str) -> str:
        for inside, here in self._places.items():
            value = value.replace(inside, here)
        return value

    def command(self, command: list[str], *more: str) -> list[str]:
        assert command[0] == "draftwood"
        return [sys.executable, "-m", "draftwood.cli", *(self.place(part) for part in command[1:]), *more]

    def start(self) -> None:
        # All that is added: compiling takes minutes, and only in float32 are texts equal on every processor.
        more = () if self.name == "gateway" else ("--no-compile", "--dtype=float32")
        whole = self.command([*self._service["entrypoint"], *self._service.get("command", [])], *more)
        with self._log.open("ab") as errors:
            self._process = subprocess.Popen(
                whole, cwd=DEPLOY.parent, env=self._environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if " ready on " in line:
                    self._ready.set()
        self._ready.set()

    def until_ready(self) -> None:
        assert self._process is not None
        assert self._ready.wait(START_S), self._log.read_text()
        assert self._process.poll() is None, self._log.read_text()

    def health(self) -> subprocess.CompletedProcess[str]:
        """Its own health check."""
        test = self._service["healthcheck"]["test"]
        assert test[0] == "CMD"
        command = self.command(test[1:])
        return subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)

    def stop(self) -> int:
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(float(self._service["stop_grace_period"].removesuffix("s")))

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="module")
def ports() -> dict[str, int]:
    return {port: free_port("127.0.0.1") for port in ("8000", "50051", "50061", "9464", "9465", "9466")}


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory, ports: dict[str, int]) -> Iterator[dict[str, Container]]:
    services = load(BASE, CPU, variables={"THREADS": "1", "MAX_BATCH": "2", "MAX_CONTEXT": "256"})["services"]
    folder = tmp_path_factory.mktemp("containers")
    with ExitStack() as exits:
        containers: dict[str, Container] = {}
        for name in NAMES:
            service = services[name]
            mounts = {
                m["target"]: str((DEPLOY / m["source"]).resolve()) for m in service["volumes"] if m["type"] == "bind"
            }
            places = mounts | {"verify:": "127.0.0.1:", "draft:": "127.0.0.1:", "0.0.0.0": "127.0.0.1"}
            places |= {port: str(here) for port, here in ports.items()}
            places |= {"/cache": str(folder / "cache"), "/models/huggingface": str(folder / "huggingface")}
            containers[name] = Container(name, service, places, folder / f"{name}.log")
            exits.callback(containers[name].kill)
        yield containers


def test_without_the_drafter(containers: dict[str, Container], ports: dict[str, int]) -> None:
    """Neither the gateway nor the verify service waits for it."""
    for name in ("verify", "gateway"):
        containers[name].start()
    for name in ("verify", "gateway"):
        containers[name].until_ready()
        assert containers[name].health().returncode == 0
    assert containers["draft"].health().returncode == 1
    assert ask(ports["8000"]).model_extra["draftwood"]["drafted"] == 0


def test_with_the_drafter(containers: dict[str, Container], ports: dict[str, int]) -> None:
    containers["draft"].start()
    containers["draft"].until_ready()
    assert containers["draft"].health().returncode == 0
    answer = ask(ports["8000"])
    while not answer.model_extra["draftwood"]["drafted"]:  # the verify service is about to find the drafter
        answer = ask(ports["8000"])
    assert answer.model_extra["draftwood"]["accepted"] > 0
    plain = ask(ports["8000"], algorithm="none")
    assert answer.choices[0].message.content == plain.choices[0].message.content


def test_metrics_and_the_end(containers: dict[str, Container], ports: dict[str, int]) -> None:
    for port in ("9464", "9465", "9466"):
        with urlopen(f"http://127.0.0.1:{ports[port]}/metrics") as page:
            assert b"draftwood_" in page.read()
    assert [containers[name].stop() for name in ("gateway", "verify", "draft")] == [0, 0, 0]
    assert containers["verify"].health().returncode == 1


def ask(port: int, **extra: str) -> Any:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        return client.chat.completions.create(
            model="sprout",
            messages=[{"role": "user", "content": "Why is sleep important?"}],
            max_tokens=16,
            temperature=0,
            extra_body=extra,
        )

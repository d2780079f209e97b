"""The command line with the real services and the embedded pair, uncompiled so that they start fast."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from draftwood.cli.machine import peak_memory_bytes
from draftwood.cli.stack.ports import free_port

pytestmark = pytest.mark.timeout(300)

SERVICES = ["--no-compile", "--dtype", "float32", "--draft-threads", "1"]


@dataclass(frozen=True)
class Running:
    """Addresses of a running stack, and the process that holds it."""

    process: subprocess.Popen[str]
    draft: str
    verify: str
    url: str


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    ports = {name: str(free_port("127.0.0.1")) for name in ("--port", "--verify-port", "--draft-port")}
    flags = [part for name, port in ports.items() for part in (name, port)]
    command = [sys.executable, "-m", "draftwood.cli", "up", *flags, *SERVICES]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if "Ctrl-C stops everything" in line:
                break
        assert lines, process.stderr.read() if process.stderr else ""
        assert sum(" ready on " in line for line in lines) == 3, lines
        draft, verify = (f"127.0.0.1:{ports[name]}" for name in ("--draft-port", "--verify-port"))
        yield Running(process, draft, verify, f"http://127.0.0.1:{ports['--port']}/v1")
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 0


def draftwood(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "draftwood.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_check(running: Running) -> None:
    for address in (running.draft, running.verify, running.url):
        result = draftwood("check", address)
        assert result.stdout == f"{address} healthy\n", result.stdout
        assert result.returncode == 0
    service = draftwood("check", running.verify, "--service", "draftwood.v1.VerifyService")
    assert service.returncode == 0, service.stdout


def test_chat_says_the_same_with_drafts_and_without(running: Running) -> None:
    answers: dict[str, str] = {}
    for algorithm in ("none", "dflash", "ddtree"):
        result = draftwood(
            "chat", "Write a poem about the first day of spring.", "--url", running.url, "--algorithm", algorithm,
            "--max-tokens", "40", "--temperature", "0.7", "--seed", "5",
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        answers[algorithm] = result.stdout
        summary = " ".join(result.stderr.split())
        assert re.search(r"40 tokens, [\d.]+ tokens/s, \d+ steps, [\d.]+ tokens per step", summary), summary
        assert ("draft tokens accepted" in summary) == (algorithm != "none")
        assert "seed 5" in summary
    assert len(set(answers.values())) == 1, answers


def test_chat_passes_a_refusal_on(running: Running) -> None:
    result = draftwood("chat", "x", "--url", running.url, "--tree-budget", "200")
    assert result.returncode == 2
    assert "tree_budget is 200, not in [1, 63]" in result.stderr


def test_bench_decode(running: Running, tmp_path: Path) -> None:
    result = draftwood(
        "bench", "decode", "--verify", running.verify, "--limit", "6", "--rounds", "1", "--max-new", "5",
        "--budgets", "7", "--chains", "7", "--algorithms", "none,dflash,ddtree,shadow",
        "--json", str(tmp_path / "result.json"), "--plot", str(tmp_path / "plot.png"),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = {row["configuration"]: row for row in json.loads((tmp_path / "result.json").read_text())["results"]}
    assert set(found) == {"none", "dflash 7", "ddtree 7", "shadow 7"}
    assert found["shadow 7"]["tokens_per_step"] == found["dflash 7"]["tokens_per_step"]
    assert found["shadow 7"]["shadow_tokens_per_step"] > found["shadow 7"]["tokens_per_step"]
    assert found["ddtree 7"]["shadow_tokens_per_step"] is None
    assert found["none"]["tokens_per_step"] == 1.0
    assert found["ddtree 7"]["tokens_per_step"] > 1.0
    assert found["ddtree 7"]["fallback_steps"] == 0
    assert found["none"]["num_tokens"] == found["ddtree 7"]["num_tokens"] == 6 * 4
    assert (tmp_path / "plot.png").is_file()


def test_another_tokenizer_is_noticed(running: Running, tmp_path: Path) -> None:
    from draftwood.checkpoint import EMBEDDED_TARGET

    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((EMBEDDED_TARGET / name).read_bytes())
    with (tmp_path / "tokenizer.json").open("a") as file:
        file.write(" ")
    result = draftwood("bench", "decode", "--verify", running.verify, "--target", str(tmp_path), "--limit", "1")
    assert result.returncode == 2
    assert "has another tokenizer than sprout" in result.stderr


def test_memory_of_the_services_is_counted(running: Running) -> None:
    assert peak_memory_bytes([running.process.pid]) > 10 << 20
    assert peak_memory_bytes([2**30]) == 0


def test_a_taken_port_is_refused_before_anything_starts(running: Running) -> None:
    port = running.url.rsplit(":", 1)[1].removesuffix("/v1")
    result = draftwood("up", "--port", port, "--verify-port", "0", "--draft-port", "0")
    assert result.returncode == 2
    assert f"error: --port {port}" in result.stderr


@pytest.mark.slow
def test_bench_exact() -> None:
    result = draftwood("bench", "exact", "--no-compile", "--limit", "4", "--max-new", "48", "--budgets", "15")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Exact" in result.stdout


@pytest.mark.slow
def test_bench_sweep_with_the_reference() -> None:
    args = ["--no-compile", "--limit", "2", "--rounds", "1", "--max-new", "16", "--budgets", "0,7", "--chains", "7"]
    result = draftwood("bench", "sweep", "--reference", *args)
    assert result.returncode == 0, result.stdout + result.stderr
    for name in ("none", "dflash 7", "ddtree 7", "transformers"):
        assert name in result.stdout


@pytest.mark.slow
def test_demo() -> None:
    result = draftwood("demo", "--max-tokens", "32", "--repeats", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "The texts are identical." in result.stdout


@pytest.mark.slow
def test_chat_starts_services_of_its_own() -> None:
    result = draftwood("chat", "Why is sleep important?", "--max-tokens", "16")
    assert result.returncode == 0, result.stderr
    assert "16 tokens" in result.stderr


def test_bench_prefill_measures_before_beside_and_after(running: Running, tmp_path: Path) -> None:
    path = tmp_path / "prefill.json"
    sizes = ("--length", "150", "--running", "2", "--rounds", "1", "--budget", "3")
    result = draftwood("bench", "prefill", *sizes, "--verify", running.verify, "--json", str(path))
    assert result.returncode == 0, result.stderr
    said = json.loads(path.read_text(encoding="utf-8"))
    assert list(said["rounds"]) == ["none", "ddtree 3"]
    for (found,) in said["rounds"].values():
        alone = (found["before_s"] + found["after_s"]) / 2
        assert found["ratio"] == pytest.approx(found["beside_s"] / alone)
        assert min(found["before_s"], found["beside_s"], found["after_s"], found["prefill_s"]) > 0

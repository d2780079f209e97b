"""What the documents say holds: the quickstart runs, examples run, links resolve, flags and files exist, tables are
current."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import httpx
import pytest

from benchmarks import plot, tables
from draftwood.cli import main
from draftwood.cli.groups import LazyGroup
from draftwood.cli.stack.launch import private_config
from draftwood.cli.stack.stack import Stack

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCUMENTS = sorted(
    [
        README,
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "draftwood" / "models").glob("*.md"),
        *(ROOT / "draftwood" / "prompts").glob("*.md"),
    ]
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
OTHER_TOOLS = (
    "pip ",
    "curl ",
    "git ",
    "docker ",
    "useradd ",
    "systemctl ",
    "python benchmarks/",
    "python -m benchmarks",
)  # whose flags are not ours

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def blocks(document: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(document.read_text()) if kind == language]


def commands(command: click.Command, path: str = "draftwood") -> Iterator[tuple[str, click.Command]]:
    """All commands with their full names, groups included."""
    yield path, command
    if isinstance(command, LazyGroup):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands(found, f"{path} {name}")


def flags_of(command: click.Command) -> set[str]:
    options = (parameter for parameter in command.params if isinstance(parameter, click.Option))
    return {"--help"} | {flag for option in options for flag in (*option.opts, *option.secondary_opts)}


FLAGS = {path: flags_of(command) for path, command in commands(main)}


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 130


def test_quickstart_is_two_make_targets() -> None:
    lines = BLOCK.findall(README.read_text())[0][1].splitlines()
    assert lines == ["make demo", "make test"]
    makefile = (ROOT / "Makefile").read_text()
    assert [line for line in lines if f"\n{line.removeprefix('make ')}:" not in makefile] == []


@pytest.mark.timeout(300)
def test_quickstart_shows_that_drafts_change_the_speed_alone() -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # Make sees the environment as up to date: this test runs in the one that it was started from.
    command = ["make", "--silent", "--old-file=.venv/.installed", "demo", f"PATH={path}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=290, check=False)
    assert result.returncode == 0, result.stderr
    said = " ".join(result.stdout.split())
    assert "The texts are identical." in said
    assert re.search(r"With draft trees the answer comes \d+\.\d\d times as fast\.", said), said
    shown = next(text for text in blocks(README, "") if "times as fast" in text)
    question, answer = (line for line in shown.split("\n\n")[:2])
    assert question in said
    assert answer.removesuffix(" …") in said
    for name in ("tokens/s", "tokens per step", "steps", "draft tokens accepted", "draft trees", "no drafts"):
        assert name in shown
        assert name in said


@each_document
def test_links_resolve(document: Path) -> None:
    text = document.read_text()
    broken: list[str] = []
    for target in LINK.findall(text):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


def anchors(document: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_document
def test_flags_exist(document: Path) -> None:
    known = set[str]().union(*FLAGS.values())
    unknown: list[str] = []
    for line in document.read_text().splitlines():
        if not any(tool in line for tool in OTHER_TOOLS):
            unknown += [f"{flag}: {line}" for flag in FLAG.findall(line) if flag not in known]
    assert unknown == []


@each_document
def test_commands_exist_and_take_their_flags(document: Path) -> None:
    wrong: list[str] = []
    text = document.read_text()
    spans = [span for span in re.findall(r"`([^`\n]+)`", text) if span.startswith("draftwood ")]
    lines = [line for _, block in BLOCK.findall(text) for line in block.splitlines() if line.startswith("draftwood ")]
    for line in (*spans, *lines):
        words = re.match(r"[a-z ]+", line)
        assert words is not None
        path = max((path for path in FLAGS if f"{words[0].strip()} ".startswith(f"{path} ")), key=len)
        is_known = path != "draftwood" or " " not in words[0].strip()
        wrong += [line] if not is_known or set(FLAG.findall(line)) - FLAGS[path] else []
    assert wrong == []


@each_document
def test_files_exist(document: Path) -> None:
    """Files of ours that are named, with or without their folder."""
    present = [str(path.relative_to(ROOT)) for package in FOLDERS for path in (ROOT / package).rglob("*.*")]
    text = re.sub(r"<sub>.*</sub>", "", document.read_text())  # captions name the prompts of the time
    named = re.findall(r"(?<![\w./-])[a-z][\w/]*\.(?:py|proto|jsonl)\b", text)
    assert [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in present)] == []


FOLDERS = ("draftwood", "draft_service", "verify_service", "gateway", "bench", "protos", "tests", "benchmarks", "docs")


@pytest.mark.timeout(300)
async def test_examples_run() -> None:
    """Examples of README and protocol page, against services on other ports."""
    values = {"compile": False, "dtype": "float32", "threads": 1}
    async with Stack(private_config(values)) as stack:
        await stack.start()
        assert stack.config.draft is not None
        ports = {
            "127.0.0.1:8000": stack.url.removeprefix("http://").removesuffix("/v1"),
            "127.0.0.1:50051": stack.verify_address,
            "127.0.0.1:50061": f"127.0.0.1:{stack.config.draft.port}",
        }
        chat, *_ = [await run_example(text, ports) for text in blocks(README, "python")]
        assert "'tokens_per_step'" in chat
        generate, failure, draft = [
            await run_example(text, ports) for text in blocks(ROOT / "docs" / "protocol.md", "python")
        ]
        assert re.search(r"\d+ tokens in \d+ steps", generate)
        assert failure.startswith("INVALID_ARGUMENT invalid_request max_new_tokens None\n")
        assert len(re.findall(r"^ *'.*' -?\d+\.\d\d$", draft, re.MULTILINE)) == 16, "a root and 15 nodes"
        await post_curl_example(ports)


async def run_example(text: str, ports: dict[str, str]) -> str:
    for written, real in ports.items():
        text = text.replace(written, real)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", text, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode()


async def post_curl_example(ports: dict[str, str]) -> None:
    text = next(text for text in blocks(README, "") if text.startswith("curl "))
    words = shlex.split(text.replace("\\\n", " "))
    url, body = words[1], json.loads(words[words.index("-d") + 1])
    for written, real in ports.items():
        url = url.replace(written, real)
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        response = await client.post(url, json=body)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("page", tables.REGIONS, ids=lambda path: path.name)
def test_results_are_what_the_script_writes(page: Path) -> None:
    text = page.read_text()
    assert tables.write(page, text) == text, "run `python -m benchmarks.tables`"


def test_the_plot_is_what_the_script_draws(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    committed = tables.PICTURE.read_text()
    if f"Matplotlib v{matplotlib.__version__}," not in committed:
        pytest.skip("drawn by another release of matplotlib")
    plot.write(tables.read(tables.SWEEP)["results"], tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text() == committed, "run `python -m benchmarks.tables`"


def result(**changes: Any) -> dict[str, Any]:
    """A result as `draftwood bench decode --json` writes it."""
    row = {
        "tokens_per_s": 100.04, "tokens_per_s_interval": [98.0, 103.0], "ratio_to_none": 1.0,
        "ratio_to_none_interval": [1.0, 1.0], "tokens_per_step": 1.0, "drafted_per_step": 0.0, "ms_per_step": 10.0,
    }  # fmt: skip
    faster = {
        "tokens_per_s": 250.0, "ratio_to_none": 2.5, "ratio_to_none_interval": [2.4, 2.55], "tokens_per_step": 4.6,
        "drafted_per_step": 15.0, "ms_per_step": 18.4,
    }  # fmt: skip
    experiment = {
        "prompts": "questions.jsonl", "num_prompts": 24, "rounds": 5, "max_new_tokens": 112, "concurrency": 1,
        "temperature": 0.0, "top_p": 1.0, "mean_answer_tokens": 80.4,
    }  # fmt: skip
    return {
        "command": "draftwood bench decode", "commit": "0123456789abcdef+", "processor": "A CPU", "cores": 2,
        "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
        "target": {"model_id": "sprout", "draft_model_id": "sprout-DFlash-b16", "dtype": "float32"},
        "experiment": experiment,
        "results": [
            {"configuration": "none"} | row,
            {"configuration": "ddtree 15"} | row | faster,
            {"configuration": "transformers"} | row | {"ratio_to_none": None, "ratio_to_none_interval": None},
        ],
    } | changes  # fmt: skip


def test_tables_show_rows_and_what_they_depend_on(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(json.dumps(result(processor="Another CPU")))
    (tmp_path / "a.json").write_text(json.dumps(result()))
    text = tables.decoding(tables.read_decoding(tmp_path))
    assert "| no drafts | 100.0 [98.0–103.0] | 1.00× | 1.00 | – | 10.00 |" in text
    assert "| tree, 15 nodes | 250.0 [98.0–103.0] | 2.50× [2.40–2.55] | 4.60 | 15.0 | 18.40 |" in text
    assert "| transformers `generate` | 100.0 [98.0–103.0] | – | 1.00 | – | 10.00 |" in text
    assert text.index("A CPU, 2 cores") < text.index("Another CPU, 2 cores")
    assert "answers of 80 tokens in the mean (limit 112)" in text
    assert "commit 0123456789 with changes" in text


def test_tables_refuse_what_they_do_not_know(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ValueError, match=r"a\.json is no result"):
        tables.read_decoding(tmp_path)
    with pytest.raises(ValueError, match="not there once"):
        tables.write(README, "no region")


def test_tables_change_nothing_but_their_region() -> None:
    names = tables.REGIONS[README]
    before = "above\n" + "".join(f"<!-- {name}:begin -->\nold\n<!-- {name}:end -->\nbelow\n" for name in names)
    after = tables.write(README, before)
    kept = re.sub(r":begin -->.*?<!-- ", ":begin -->\nold\n<!-- ", after, flags=re.DOTALL)
    assert (kept, "old" in after) == (before, False)
    assert tables.write(README, after) == after

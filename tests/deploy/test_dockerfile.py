"""The Dockerfile, as far as it can be checked without building: what it copies is there and reaches the builder."""

from __future__ import annotations

import re
import shlex
import sys
from typing import Any

import pytest
from dockerfile_parse import DockerfileParser  # pyright: ignore[reportMissingTypeStubs]

from tests.deploy.compose import DEPLOY

ROOT = DEPLOY.parent
Instruction = tuple[str, str]


def stages() -> dict[str, tuple[str, list[Instruction]]]:
    """Base and instructions of each stage."""
    structure: Any = DockerfileParser(path=str(DEPLOY / "Dockerfile")).structure
    found: dict[str, tuple[str, list[Instruction]]] = {}
    name = ""
    for part in structure:
        if part["instruction"] == "FROM":
            base, _, name = part["value"].partition(" AS ")
            found[name] = (base, [])
        elif part["instruction"] != "COMMENT":
            found[name][1].append((part["instruction"], part["value"]))
    return found


def chain(name: str) -> list[Instruction]:
    """Instructions of a stage and of those that it is based on, from the bottom."""
    base, own = stages()[name]
    return [*(chain(base) if base in stages() else []), *own]


def copied_from_context() -> list[str]:
    sources: list[str] = []
    for _, instructions in stages().values():
        for instruction, value in instructions:
            if instruction == "COPY" and "--from=" not in value:
                sources += shlex.split(value)[:-1]
    return sources


def test_sources_of_copies_exist_and_are_sent_to_the_builder() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in ignored if line and not line.startswith("#")]
    assert rules[0] == "*"
    sent = {line.removeprefix("!") for line in rules if line.startswith("!")}
    sources = copied_from_context()
    assert sources
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert set(sources) == sent


def test_everything_that_is_installed_is_copied() -> None:
    """What pyproject.toml packs, and what it reads to do so."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = [pattern.removesuffix("*") for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]]
    read = [project["project"]["readme"], *project["project"]["license-files"], "pyproject.toml"]
    assert {*packages, *read} <= set(copied_from_context())


def test_extras_are_defined_and_pinned_below_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DEPLOY))
    import requirements as script  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

    wanted: Any = script.requirements  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    text = (DEPLOY / "Dockerfile").read_text()
    calls = re.findall(r"python requirements\.py ?([\w ]*) > requirements\.txt", text)
    assert sorted(calls) == ["", "gpu"]
    for extras in calls:
        lines: list[str] = wanted(ROOT / "pyproject.toml", extras.split())
        assert any(line.startswith("torch>=") for line in lines)
        assert any(line.startswith("triton>=") for line in lines) == ("gpu" in extras)
    with pytest.raises(KeyError):
        wanted(ROOT / "pyproject.toml", ["no-such-extra"])
    sys.modules.pop("requirements")


def test_stages_that_are_named_exist_in_time() -> None:
    seen: list[str] = []
    for name, (base, instructions) in stages().items():
        assert base in seen or ":" in base
        for _, value in instructions:
            assert set(re.findall(r"\bfrom=([\w-]+)", value)) <= set(seen)
        seen.append(name)
    assert {"cpu", "cuda"} <= set(seen)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_targets(target: str) -> None:
    instructions = chain(target)
    last = dict(instructions)
    assert instructions[-1] == ("USER", "draftwood")
    assert any("useradd --uid 10001" in value and "install -d -o draftwood" in value for _, value in instructions)
    assert last["ENTRYPOINT"] == '["draftwood"]'
    assert last["VOLUME"] == '["/models", "/cache"]'
    assert '"draftwood", "check"' in last["HEALTHCHECK"]
    assert last["COPY"] == f"--from=packages-{target} /opt/draftwood /opt/draftwood"

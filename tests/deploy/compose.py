"""Compose files as Compose reads them: variables filled in, overrides merged, `!reset` and `!override` obeyed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
BASE, ONE_GPU, CPU, TELEMETRY = (
    DEPLOY / f"docker-compose{name}.yaml" for name in ("", ".one-gpu", ".cpu", ".telemetry")
)
VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::-(?P<default>[^}]*))?\}")
RESET = object()
REPLACED = ("command", "entrypoint", "test")  # lists that an override replaces; it adds to all others


class Override(list[Any]):
    """A list that replaces the one below it."""


class _Loader(yaml.SafeLoader):
    pass


def _override(loader: yaml.SafeLoader, node: yaml.Node) -> Override:
    assert isinstance(node, yaml.SequenceNode)
    return Override(loader.construct_sequence(node, deep=True))


_Loader.add_constructor("!reset", lambda _loader, _node: RESET)
_Loader.add_constructor("!override", _override)


def load(*paths: Path, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What `docker compose -f … -f … config` makes of the files."""
    merged: Any = {}
    for path in paths:
        merged = merge(merged, _fill(yaml.load(path.read_text(), _Loader), variables or {}))
    return _without_resets(merged)


def merge(below: Any, above: Any, name: str = "") -> Any:
    """Maps are merged, lists added up, all else replaced."""
    if isinstance(below, dict) and isinstance(above, dict):
        keys = [*below, *(key for key in above if key not in below)]
        return {
            key: merge(below[key], above[key], key) if key in below and key in above else {**below, **above}[key]
            for key in keys
        }
    if isinstance(below, list) and isinstance(above, list) and not isinstance(above, Override):
        return above if name in REPLACED else [*below, *above]
    return above


def variables_of(*paths: Path) -> dict[str, str]:
    """Every variable with its default."""
    return {match["name"]: match["default"] or "" for path in paths for match in VARIABLE.finditer(path.read_text())}


def _fill(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return VARIABLE.sub(lambda match: variables.get(match["name"], match["default"] or ""), value)
    if isinstance(value, list):
        return type(value)(_fill(part, variables) for part in value)
    return {key: _fill(part, variables) for key, part in value.items()} if isinstance(value, dict) else value


def _without_resets(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_resets(part) for key, part in value.items() if part is not RESET}
    return [_without_resets(part) for part in value] if isinstance(value, list) else value

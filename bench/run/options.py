"""What the commands take and write in common: a file of prompts in, a file of results out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from draftwood.cli import machine

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def prompts_argument(function: AnyFunction) -> AnyFunction:
    """PROMPTS, a file that exists, or None for the shipped questions."""
    path = click.Path(exists=True, dir_okay=False, path_type=Path)
    return click.argument("prompts", required=False, type=path)(function)


def json_option(function: AnyFunction) -> AnyFunction:
    """--json FILE, as `json_path`."""
    path = click.Path(dir_okay=False, path_type=Path)
    text = "Write the results to a file, with what they depend on."
    return click.option("--json", "json_path", type=path, help=text)(function)


def write_json(values: dict[str, Any], path: Path | None) -> None:
    """Writes the results with the commit and the processor that they depend on; nothing without a path."""
    if path is None:
        return
    where = {"commit": machine.commit(), "processor": machine.processor(), "cores": machine.num_cores()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(where | values, indent=2) + "\n", encoding="utf-8")

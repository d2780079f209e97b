"""Prints what pyproject.toml requires, and what the extras named as arguments add: the image's layer below the code."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """Requirement lines. Raises KeyError for an extra that is not defined."""
    project = tomllib.loads(pyproject.read_text())["project"]
    return [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements(Path("pyproject.toml"), sys.argv[1:])) + "\n")

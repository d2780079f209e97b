"""Writes the packages in docs/architecture.md and the modules in docs/modules.md, by their docstrings.

    python -m docs.modules

The regions between the comments are this script's own: a test compares them with what the script writes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from docs.region import rewritten

ROOT = Path(__file__).parent.parent
PAGES = {"packages": ROOT / "docs" / "architecture.md", "modules": ROOT / "docs" / "modules.md"}
TOP = ("draftwood", "draft_service", "verify_service", "gateway", "bench")
GENERATED = ROOT / "draftwood" / "v1"


def packages() -> Iterator[Path]:
    """Folders of packages, each before those in it."""
    for name in TOP:
        yield from sorted(path.parent for path in (ROOT / name).rglob("__init__.py") if path.parent != GENERATED)


def summary(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    paragraph = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", " ".join(paragraph.split()))[0]


def link(path: Path, text: str) -> str:
    """To a file or folder, as seen from docs/."""
    return f"[`{text}`](../{path.relative_to(ROOT)})"


def packages_region() -> str:
    """One row for each package."""
    rows = [f"| {link(p, f'{p.relative_to(ROOT)}/')} | {_cell(summary(p / '__init__.py'))} |" for p in packages()]
    return "\n".join(["| package | what it is for |", "|---|---|", *rows])


def modules_region() -> str:
    """A list of modules for each package."""
    return "\n\n".join(_list(package) for package in packages())


def _list(package: Path) -> str:
    files = [path for path in sorted(package.glob("*.py")) if path.name != "__init__.py"]
    lines = [f"- {link(path, path.name)}: {summary(path)}" for path in files]
    head = [f"### {package.relative_to(ROOT)}", "", summary(package / "__init__.py")]
    return "\n".join([*head, *(["", *lines] if lines else [])])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def write(name: str, text: str) -> str:
    """`text` with the region `name` replaced."""
    return rewritten(text, name, packages_region() if name == "packages" else modules_region())


if __name__ == "__main__":
    for region, page in PAGES.items():
        page.write_text(write(region, page.read_text(encoding="utf-8")), encoding="utf-8")

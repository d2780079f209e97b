"""Rules that hold for the repository as a whole and that no linter checks."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("draftwood", "draft_service", "verify_service", "gateway", "bench")
STUBS = ROOT / "draftwood" / "v1"
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60
MAX_KERNEL_FUNCTION_LINES = 120


def source_files() -> list[Path]:
    """Hand-written Python files of the packages."""
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return sorted(path for path in files if STUBS not in path.parents)


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def repository_files() -> list[Path]:
    """Files that are committed or could be."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in result.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_stubs_are_current(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # Make sees the environment as up to date: this test runs in the one that it was started from.
    command = ["make", "--silent", "--old-file=.venv/.installed", "protos", f"OUT={tmp_path}", f"PATH={path}"]
    subprocess.run(command, cwd=ROOT, check=True)
    fresh = {path.name: path.read_text() for path in (tmp_path / "draftwood" / "v1").iterdir()}
    committed = {path.name: path.read_text() for path in STUBS.glob("*_pb2*.py*")}
    assert committed.keys() == fresh.keys(), "run `make protos`"
    assert [name for name in fresh if fresh[name] != committed[name]] == [], "run `make protos`"


def test_files_are_short() -> None:
    lengths = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in source_files()}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    too_long: list[str] = []
    for path in source_files():
        limit = MAX_KERNEL_FUNCTION_LINES if "kernels" in path.parts else MAX_FUNCTION_LINES
        for function in functions(ast.parse(path.read_text())):
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            if lines > limit:
                too_long.append(f"{path.relative_to(ROOT)}:{function.lineno} {function.name}: {lines} > {limit}")
    assert too_long == []


def test_modules_say_what_they_are_for() -> None:
    silent = [path for path in source_files() if not ast.get_docstring(ast.parse(path.read_text()))]
    assert [str(path.relative_to(ROOT)) for path in silent] == []


def test_tests_lie_where_their_module_does() -> None:
    """A test of a package is `tests/PACKAGE/FOLDER/test_MODULE.py`, or `test_MODULE_ASPECT.py`."""
    modules = [path.relative_to(ROOT).with_suffix("") for path in source_files()]
    stray: list[str] = []
    for path in (path for package in PACKAGES for path in (ROOT / "tests" / package).rglob("test_*.py")):
        subject = path.relative_to(ROOT / "tests").with_name(path.stem.removeprefix("test_"))
        beside = [module.name for module in modules if module.parent == subject.parent]
        if not any(f"{subject.name}_".startswith(f"{name}_") for name in beside):
            stray.append(str(path.relative_to(ROOT)))
    assert stray == []


def test_gateway_runs_without_torch() -> None:
    """The import contract sees import statements; this sees what is really imported."""
    files = [path for path in source_files() if path.parts[len(ROOT.parts)] == "gateway" and path.stem != "__main__"]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files]
    imports = "".join(f"import {module}\n" for module in modules)
    check = "import sys\nprint(*{'torch', 'transformers', 'triton'} & sys.modules.keys())"
    result = subprocess.run(
        [sys.executable, "-c", imports + check], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr


def test_no_file_names_a_machines_paths() -> None:
    needles = [f"/{folder}/".encode() for folder in ("work", "root")]
    naming = [path for path in repository_files() if any(needle in content(path) for needle in needles)]
    assert [str(path.relative_to(ROOT)) for path in naming] == []


def content(path: Path) -> bytes:
    """Bytes of a text file; nothing for a binary one."""
    data = path.read_bytes()
    return b"" if b"\0" in data[:8192] else data

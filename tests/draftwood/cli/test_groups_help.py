"""Help pages and start-up of the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from draftwood.cli import main
from draftwood.cli.groups import LazyGroup


def commands(group: LazyGroup, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str, click.Command]]:
    """Path, listed text and command, groups included."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield (*path, name), group.lazy_commands[name][1], command
        if isinstance(command, LazyGroup):
            yield from commands(command, (*path, name))


ALL = list(commands(main))


@pytest.mark.parametrize(("path", "listed", "command"), ALL, ids=[" ".join(path) for path, _, _ in ALL])
def test_help_renders(path: tuple[str, ...], listed: str, command: click.Command) -> None:
    result = CliRunner().invoke(main, [*path, "--help"])
    assert result.exit_code == 0, result.output
    assert (command.help or "").split("\n")[0] == listed, "the list and the page say different things"
    if not isinstance(command, LazyGroup):
        assert "Example" in result.output
        assert f"draftwood {' '.join(path)}" in result.output


@pytest.mark.parametrize(("path", "command"), [(path, command) for path, _, command in ALL])
def test_every_option_has_help(path: tuple[str, ...], command: click.Command) -> None:
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    assert [f"{path} {option.opts}" for option in options if not option.help] == []


def test_help_imports_nothing_heavy() -> None:
    script = """
import sys
from draftwood.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
print(*{"torch", "transformers", "grpc", "httpx", "numpy", "rich.table"} & sys.modules.keys(), file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == ""
    assert "Commands:" in result.stdout


def test_commands_do_not_import_torch() -> None:
    """One process for all: what one command imports is seen after it and after each one behind it."""
    script = f"""
import contextlib, io, sys
from draftwood.cli import main
for path in {[path for path, _, command in ALL if not isinstance(command, LazyGroup)]!r}:
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main([*path, "--help"])
    assert "Usage: " in said.getvalue(), path
    assert not {{"torch", "transformers"}} & sys.modules.keys(), path
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_an_unknown_command_is_a_usage_error() -> None:
    result = CliRunner().invoke(main, ["serve"])
    assert result.exit_code == 2
    assert "No such command 'serve'" in result.output

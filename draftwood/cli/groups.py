"""A click group whose commands are imported when they are called, and whose errors become exit codes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import IO, Any

import click


class LazyGroup(click.Group):
    """`lazy_commands` maps a command's name to ("module:attribute", short help), in the order of the help page."""

    def __init__(self, *args: Any, lazy_commands: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy_commands = lazy_commands

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names in the declared order."""
        return list(self.lazy_commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Imports the command's module."""
        if cmd_name not in self.lazy_commands:
            return None
        module, attribute = self.lazy_commands[cmd_name][0].split(":")
        return getattr(importlib.import_module(module), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Lists the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.lazy_commands.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; a DraftwoodError becomes one line and exit code 2 for a bad setting, else 1."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(130)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            raise _expected(error) from error


def _expected(error: Exception) -> Exception:
    """The error as one that click prints, if it is one of ours."""
    from draftwood.errors import ConfigError, DraftwoodError, InvalidRequestError

    if not isinstance(error, DraftwoodError):
        return error
    return (
        _SettingFailure(error.message)
        if isinstance(error, ConfigError | InvalidRequestError)
        else _Failure(error.message)
    )


class _Failure(click.ClickException):
    """Prints `error: …` as the services do."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Prints the message on standard error."""
        click.echo(f"error: {self.format_message()}", file=file, err=file is None)


class _SettingFailure(_Failure):
    """The caller's fault."""

    exit_code = 2

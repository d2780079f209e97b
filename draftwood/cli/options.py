"""Click options generated from the fields of the services' configurations, and configurations built from their values.

The dataclasses of `draftwood.config` stay the one place where a setting has its name, default, choices and help.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, get_type_hints

import click

from draftwood.config import Config, flag

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
AnyConfig = TypeVar("AnyConfig", bound=Config)


def settings(
    config: type[Config],
    *,
    only: Collection[str] | None = None,
    skip: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> Callable[[AnyFunction], AnyFunction]:
    """Adds an option for each field of `config`, in their order; `defaults` overrides theirs."""
    hints = get_type_hints(config)
    chosen = [
        spec for spec in dataclasses.fields(config) if spec.name not in skip and (only is None or spec.name in only)
    ]

    def decorate(function: AnyFunction) -> AnyFunction:
        for spec in reversed(chosen):
            default = (defaults or {}).get(spec.name, spec.default)
            function = _option(spec, hints[spec.name], default)(function)
        return function

    return decorate


def _option(spec: dataclasses.Field[Any], kind: type, default: Any) -> Callable[[AnyFunction], AnyFunction]:
    name, text = spec.name, spec.metadata["help"]
    if kind is bool:
        return click.option(f"{flag(name)}/{flag('no_' + name)}", name, default=default, show_default=True, help=text)
    choices = spec.metadata["choices"]
    value_type = click.Choice(choices) if choices else kind
    return click.option(flag(name), name, type=value_type, default=default, show_default=default != "", help=text)


def build(config: type[AnyConfig], values: Mapping[str, Any], **fixed: Any) -> AnyConfig:
    """A configuration from option values, of which it takes those that it has fields for; `fixed` goes first.

    Raises ConfigError naming the flag.
    """
    taken = {spec.name: values[spec.name] for spec in dataclasses.fields(config) if spec.name in values}
    return config(**(taken | fixed))


class FiniteRange(click.FloatRange):
    """A range that takes numbers only: nan is neither below a limit nor above it, and inf seconds never end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number", param, ctx)
        return number


def int_list(_context: click.Context, option: click.Parameter, value: str) -> tuple[int, ...]:
    """Click callback for comma-separated whole numbers."""
    try:
        numbers = tuple(int(part) for part in value.split(",") if part.strip())
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of whole numbers such as 7,15,31", param=option) from None
    if not numbers:
        raise click.BadParameter("the list is empty", param=option)
    if min(numbers) < 0:
        raise click.BadParameter(f"{min(numbers)} is not at least 0", param=option)
    return numbers

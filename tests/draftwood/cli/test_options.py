"""Options generated from configurations, and back."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from draftwood.cli import main
from draftwood.cli.options import build, int_list, settings
from draftwood.cli.stack.environment import service_environment
from draftwood.config import Config, DraftConfig, GatewayConfig, VerifyConfig, flag
from draftwood.errors import ConfigError


@pytest.mark.parametrize("config", [DraftConfig, VerifyConfig, GatewayConfig])
def test_every_field_is_an_option_with_its_default(config: type[Config]) -> None:
    seen: dict[str, Any] = {}

    @click.command()
    @settings(config)
    def command(**values: Any) -> None:
        seen.update(values)

    result = CliRunner().invoke(command, [])
    assert result.exit_code == 0, result.output
    assert seen == {spec.name: spec.default for spec in dataclasses.fields(config)}
    assert build(config, seen) == config()


def test_values_come_through_as_the_service_parses_them() -> None:
    seen: dict[str, Any] = {}

    @click.command()
    @settings(VerifyConfig)
    def command(**values: Any) -> None:
        seen.update(values)

    args = ["--tree-budget", "31", "--no-compile", "--dtype", "bfloat16", "--drafter", "none", "--tree-spine"]
    assert CliRunner().invoke(command, args).exit_code == 0
    config = build(VerifyConfig, seen)
    assert config == VerifyConfig.from_args(args, "test")
    assert VerifyConfig.from_args(config.to_args(), "test") == config


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["verify", "--tree-budget", "64"], "error: --tree-budget is 64, not in [0, 63]"),
        (["verify", "--draft-timeout-ms", "30001"], "error: --draft-timeout-ms is 30001, not in [1, 30000]"),
        (["draft", "--port", "70000"], "error: --port is 70000, not in [0, 65535]"),
        (["gateway", "--keepalive-s", "-1"], "error: --keepalive-s is -1.0, not in [0, 3600]"),
        (["verify", "--dtype", "int4"], "'int4' is not one of 'auto', 'float32', 'bfloat16', 'float16'"),
        (["bench", "decode", "--algorithms", "none,medusa"], "error: --algorithms: medusa is not among"),
        (["bench", "sweep", "--budgets", "7,x"], "'7,x' is not a list of whole numbers"),
        (["bench", "decode", "--reference", "--concurrency", "2"], "error: --reference decodes one prompt at a time"),
        (["bench", "decode", "--top-p", "0"], "error: top_p is 0.0, not in (0.0, 1.0]"),
        (["chat", "x", "--max-tokens", "0"], "Invalid value for '--max-tokens': 0 is not in the range x>=1"),
        (["chat", " "], "the question is empty"),
        (["chat", "x", "--temperature", "nan"], "Invalid value for '--temperature': nan is not a finite number"),
        (["chat", "x", "--temperature", "-1"], "-1.0 is not in the range x>=0"),
        (["check", "--timeout", "nan"], "Invalid value for '--timeout': nan is not a finite number"),
        (["check", "--timeout", "inf"], "Invalid value for '--timeout': inf is not a finite number"),
        (["check", "--timeout", "0"], "0.0 is not in the range x>0"),
        (["bench", "decode", "--temperature", "nan"], "error: temperature is nan, not in [0.0, 100.0]"),
        (
            ["bench", "project", __file__, "--draft-ms", "inf"],
            "Invalid value for '--draft-ms': inf is not a finite number",
        ),
        (["info", "--target", "./nowhere"], "error: --target ./nowhere: no such directory"),
    ],
)
def test_bad_settings_are_named(args: list[str], message: str) -> None:
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize("config", [DraftConfig, VerifyConfig, GatewayConfig])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_settings_in_seconds_and_parts_are_finite(config: type[Config], value: float) -> None:
    names = [spec.name for spec in dataclasses.fields(config) if isinstance(spec.default, float)]
    assert names
    for name in names:
        with pytest.raises(ConfigError, match=f"{flag(name)} is {value}") as caught:
            config(**{name: value})
        assert caught.value.field == name


def test_int_list() -> None:
    context, option = click.Context(click.Command("x")), click.Option(["--x"])
    assert int_list(context, option, "7, 15,31,") == (7, 15, 31)
    with pytest.raises(click.BadParameter, match="empty"):
        int_list(context, option, " , ")


def test_environment_has_defaults_that_the_users_own_override(tmp_path: Path) -> None:
    environment = service_environment("draft_service", {"XDG_CACHE_HOME": str(tmp_path), "PATH": "x"})
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "draftwood" / "inductor")
    assert environment["GOMP_SPINCOUNT"] == "2000"
    assert environment["PYTHONUNBUFFERED"] == "1"
    assert environment["PATH"] == "x"
    assert service_environment("draft_service", {"GOMP_SPINCOUNT": "5"})["GOMP_SPINCOUNT"] == "5"
    assert "GOMP_SPINCOUNT" not in service_environment("", {})
    assert service_environment("", {"PYTHONPATH": "mine", "HOME": "x"})["PYTHONPATH"].split(":")[0] == "mine"


def test_services_take_this_processs_place(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, list[str], dict[str, str]]] = []

    def execve(path: str, command: list[str], environment: dict[str, str]) -> None:
        calls.append((path, command, environment))

    monkeypatch.setattr("os.execve", execve)
    result = CliRunner().invoke(main, ["draft", "--port", "0", "--no-compile"])
    assert result.exit_code == 0, result.output
    path, command, environment = calls[0]
    assert command[0] == path
    assert command[1:] == ["-P", "-m", "draft_service", "--no-compile", "--port", "0"]
    assert environment["GOMP_SPINCOUNT"] == "2000"


@pytest.mark.parametrize(
    ("option", "value"),
    [("--port", "70000"), ("--verify-port", "70000"), ("--draft-port", "-1"), ("--draft-threads", "-5"),
     ("--metrics-port", "65534")],
)  # fmt: skip
def test_up_names_the_option_that_was_given(option: str, value: str) -> None:
    """Not the one that the service has in its place."""
    result = CliRunner().invoke(main, ["up", f"{option}={value}"])
    assert result.exit_code == 2
    assert f"'{option}': {value} is not in the range" in result.output


@pytest.mark.parametrize(
    ("option", "value"),
    [("--seconds", "nan"), ("--seconds", "inf"), ("--hang-ups", "nan"), ("--kill-every", "nan"), ("--draft", "none")],
)
def test_soak_names_what_it_cannot_do(option: str, value: str) -> None:
    result = CliRunner().invoke(main, ["bench", "soak", f"{option}={value}"])
    assert result.exit_code == 2
    assert option in result.output
    assert value in result.output


def test_a_budget_below_0_is_no_budget() -> None:
    result = CliRunner().invoke(main, ["bench", "decode", "--budgets=7,-5"])
    assert result.exit_code == 2
    assert "'--budgets': -5 is not at least 0" in result.output

"""`draftwood draft`, `verify` and `gateway`: one service in this process's place."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import click

from draftwood.cli.options import build, settings
from draftwood.cli.stack.environment import service_environment
from draftwood.config import Config, DraftConfig, GatewayConfig, VerifyConfig


@click.command()
@settings(DraftConfig)
def draft(**values: Any) -> None:
    """Run the draft service alone.

    \b
    Example, on the machine that drafts for another one:
      draftwood draft --host 0.0.0.0 --target Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16
    """
    _become("draft_service", build(DraftConfig, values))


@click.command()
@settings(VerifyConfig)
def verify(**values: Any) -> None:
    """Run the verify service alone.

    \b
    Examples:
      draftwood verify --drafter 10.0.0.7:50061
      draftwood verify --drafter none --algorithm none
    """
    _become("verify_service", build(VerifyConfig, values))


@click.command()
@settings(GatewayConfig)
def gateway(**values: Any) -> None:
    """Run the gateway alone.

    \b
    Example:
      draftwood gateway --host 0.0.0.0 --verify 10.0.0.8:50051
    """
    _become("gateway", build(GatewayConfig, values))


def _become(module: str, config: Config) -> NoReturn:
    """Replaces this process by the service, so that signals and exit codes are its own."""
    command = [sys.executable, "-P", "-m", module, *config.to_args()]
    os.execve(command[0], command, service_environment(module))

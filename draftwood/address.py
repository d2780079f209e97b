"""Hosts and ports as one text."""

from __future__ import annotations

import re

from draftwood.errors import ConfigError

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^\s:\[\]/]+):(\d{1,5})")


def join(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in the brackets without which its last part would be taken for the port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_address(name: str, value: str) -> None:
    """Raises ConfigError for flag `--name` unless the value is such a text; port 0 stands for one not yet known."""
    found = _ADDRESS.fullmatch(value)
    if found is None or not int(found[2]) < 65536:
        raise ConfigError(f"--{name} is {value!r}, not HOST:PORT", field=name)

"""Addresses that flags give."""

from __future__ import annotations

import pytest

from draftwood.config import GatewayConfig, VerifyConfig
from draftwood.errors import ConfigError


@pytest.mark.parametrize("address", ["127.0.0.1:50051", "verify:1", "[::1]:65535", "a-b.example:80"])
def test_addresses(address: str) -> None:
    assert GatewayConfig(verify=address).verify == address
    assert VerifyConfig(drafter=address).drafter == address


@pytest.mark.parametrize("address", ["", "localhost", "localhost:", ":50051", "a:65536", "::1:50051", "a b:1"])
def test_what_is_no_address_is_named(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--verify is .* not HOST:PORT"):
        GatewayConfig(verify=address)
    with pytest.raises(ConfigError, match=r"--drafter is .* not HOST:PORT"):
        VerifyConfig(drafter=address)


def test_no_drafter_is_not_an_address() -> None:
    assert VerifyConfig(drafter="none").drafter == "none"

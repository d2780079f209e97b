"""Fixtures of the tests of transport security, which conftest.py files take from here."""

import pytest

from draftwood.config import GatewayConfig
from gateway.api.served_model import ServedModel
from tests.support.authority import Authority


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Keys take a moment to make, so that all tests share them."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def model() -> ServedModel:
    """What a gateway knows of the target."""
    return ServedModel.load(GatewayConfig())

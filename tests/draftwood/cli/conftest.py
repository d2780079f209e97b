"""Fixtures of the command line's tests."""

from pathlib import Path

import pytest

from tests.draftwood.cli.fake_services import FakeServices
from tests.support.security_fixtures import authority, model

__all__ = ["authority", "fakes", "model"]


@pytest.fixture
def fakes(tmp_path: Path) -> FakeServices:
    """Stand-ins for the services."""
    return FakeServices(tmp_path)

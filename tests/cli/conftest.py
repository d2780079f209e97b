"""Fixtures of the command line's tests."""

from pathlib import Path

import pytest

from tests.cli.fake_services import FakeServices


@pytest.fixture
def fakes(tmp_path: Path) -> FakeServices:
    """Stand-ins for the services."""
    return FakeServices(tmp_path)

"""What all tests share: no network, and property tests that repeat."""

import os

import pytest
from hypothesis import settings

# Before any import of transformers: tests take models from this repository or make them, never from a hub.
os.environ["HF_HUB_OFFLINE"] = "1"

# Machines differ too much in speed for a deadline a case, and a failure must come back when the test is run again.
settings.register_profile("draftwood", deadline=None, derandomize=True)
settings.load_profile("draftwood")

# Two workers, each with a whole file at a time, end together where what takes longest begins first.
LONG = (
    "kernels/test_compiled.py",
    "cpu/test_runner_exactness.py",
    "kernels/test_interpreted.py",
    "cpu/test_target_compiled.py",
    "repository/test_readme.py",
    "bench/test_soak.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, everything else in its order."""
    items.sort(key=lambda item: next((i for i, name in enumerate(LONG) if item.path.match(name)), len(LONG)))

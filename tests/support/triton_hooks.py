"""Triton kernels run in the interpreter, or on a GPU when there is one.

What `triton.jit` makes is settled when Triton is first imported, so a process either interprets or compiles. Without a
GPU, tests of kernels run in processes of their own with TRITON_INTERPRET=1, which test_interpreted.py starts; to run
one by hand: `TRITON_INTERPRET=1 pytest tests/verify_service/kernels/triton/test_conv_gate.py`. On a machine with a GPU
they run there, and `pytest -m gpu` runs those at served sizes. The conftest.py of each folder of such tests takes its
hooks from here.
"""

import os
from pathlib import Path

import pytest
import torch

from tests.support.triton_interpreter import spare_needless_work

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if IS_INTERPRETED:
    spare_needless_work()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out what this process cannot run."""
    is_test = collection_path.name.startswith("test_")
    return True if is_test and not IS_INTERPRETED and not torch.cuda.is_available() else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The interpreter computes with numpy, which warns where a GPU gives inf."""
    for item in items:
        if IS_INTERPRETED:
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run."""
    if IS_INTERPRETED:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise pytest.UsageError("without a GPU, run this with TRITON_INTERPRET=1")
    return torch.device("cuda")

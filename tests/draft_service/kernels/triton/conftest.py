"""Triton kernels run in the interpreter, or on a GPU: tests/support/triton_hooks.py says how."""

from tests.support.triton_hooks import device, pytest_collection_modifyitems, pytest_ignore_collect

__all__ = ["device", "pytest_collection_modifyitems", "pytest_ignore_collect"]

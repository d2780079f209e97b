"""The kernels that make trees in Triton. Imports Triton, and so is imported where a GPU is sure."""

from __future__ import annotations

from draft_service.kernels.kernel_set import KernelSet
from draft_service.kernels.triton.best_first import best_first
from draft_service.kernels.triton.likeliest import Likeliest


class TritonKernels:
    """One launcher per kernel. One keeps scratch memory, and is made anew for each set."""

    best_first = staticmethod(best_first)

    def __init__(self) -> None:
        self.likeliest = Likeliest()


def triton_set() -> KernelSet:
    """The launchers, with scratch memory of their own."""
    return TritonKernels()

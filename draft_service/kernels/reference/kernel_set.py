"""The kernels that make trees in plain PyTorch, on any device."""

from __future__ import annotations

from draft_service.kernels.kernel_set import KernelSet
from draft_service.kernels.reference.best_first import best_first
from draft_service.kernels.reference.likeliest import likeliest


class ReferenceKernels:
    """One twin per kernel."""

    likeliest = staticmethod(likeliest)
    best_first = staticmethod(best_first)


PLAIN: KernelSet = ReferenceKernels()

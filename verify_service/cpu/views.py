"""What recurrent mixers of every kind get from a pass and leave for the commit."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RecurrentView:
    """One layer's committed state and where the pass leaves what a commit needs."""

    states: Tensor  # [T, HV, V, K] float32
    windows: Tensor  # [T, kernel_size - 1, C]
    inputs: Tensor  # [B, N, C], written
    k: Tensor  # [B, N, HK, K] float32, written
    v: Tensor  # [B, N, HV, V] float32, written
    g: Tensor  # [B, N, HV] float32, written
    beta: Tensor  # [B, N, HV] float32, written

    def varying(self) -> list[tuple[Tensor, list[int]]]:
        """Tensors with the dimensions that vary from step to step."""
        return [(t, [0, 1]) for t in (self.inputs, self.k, self.v, self.g, self.beta)]


@dataclass(frozen=True, slots=True)
class WindowView:
    """The same of a layer whose only memory is its convolution's window."""

    windows: Tensor  # [T, kernel_size - 1, C]
    inputs: Tensor  # [B, N, C], written

    def varying(self) -> list[tuple[Tensor, list[int]]]:
        """Tensors with the dimensions that vary from step to step."""
        return [(self.inputs, [0, 1])]

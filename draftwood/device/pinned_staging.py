"""Small static tensors that travel between host and device in one copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16


class PinnedStaging:
    """Several small tensors in one piece of memory, on the host (pinned where there is a GPU) and on the device."""

    def __init__(self, parts: dict[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> None:
        sizes = {name: int(np.prod(shape)) * dtype.itemsize for name, (shape, dtype) in parts.items()}
        total = sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes.values())
        self.on_host = torch.zeros(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.on_device = torch.zeros(total, dtype=torch.uint8, device=device)
        self.host: dict[str, NDArray[Any]] = {}
        self.device: dict[str, Tensor] = {}
        begin = 0
        for name, (shape, dtype) in parts.items():
            end = begin + sizes[name]
            self.host[name] = self.on_host[begin:end].view(dtype).view(shape).numpy()
            self.device[name] = self.on_device[begin:end].view(dtype).view(shape)
            begin += -(-sizes[name] // _ALIGNMENT) * _ALIGNMENT

    def send(self) -> None:
        """Host to device."""
        self.on_device.copy_(self.on_host, non_blocking=True)

    def fetch(self) -> None:
        """Device to host; to be read after the stream has come to it."""
        self.on_host.copy_(self.on_device, non_blocking=True)

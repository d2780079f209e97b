"""What launches share: limits on shapes, and the overlap of a kernel's start with the end of the one before."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from draftwood.errors import UnsupportedModelError


def require(holds: bool, field: str, message: str) -> None:
    """Raises UnsupportedModelError for what a kernel does not take."""
    if not holds:
        raise UnsupportedModelError(message, field=field)


def require_kernel_size(size: int) -> None:
    """Of causal convolutions."""
    require(2 <= size <= 4, "conv_kernel", f"conv_kernel must be 2 to 4, not {size}, on a GPU")


def require_head_sizes(**sizes: int) -> None:
    """Of recurrent layers, by the names of their fields."""
    for field, size in sizes.items():
        require(size in (16, 32, 64, 128, 256), field, f"{field} must be 16, 32, 64, 128 or 256, not {size}, on a GPU")


def overlaps(device: torch.device) -> bool:
    """Whether a kernel may start before the one ahead of it has ended: from compute capability 9.0 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def wait_for_kernels(OVERLAPS: tl.constexpr):
    """Returns when the kernels ahead have ended."""
    if OVERLAPS:
        cuda.gdc_wait()


@triton.jit
def wait_for_inputs(OVERLAPS: tl.constexpr):
    """The same, and lets the next one start.

    In this order, so that a kernel that has not waited yet may read whatever the last but one wrote.
    """
    wait_for_kernels(OVERLAPS)
    if OVERLAPS:
        cuda.gdc_launch_dependents()

"""Which implementation of the kernels a pass uses: Triton's on a GPU, their plain twins anywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelSet:
    """One launcher a kernel, all of one kind; arguments as in verify_service/kernels/triton."""

    is_capturable: bool  # whether a graph can hold them: nothing in them comes back to the host
    tree_metadata: Callable[..., None]
    conv_gate: Callable[..., None]
    gdn_verify: Callable[..., None]
    mamba2_conv_gate: Callable[..., None]
    mamba2_verify: Callable[..., None]
    add_norm: Callable[..., None]
    swiglu: Callable[..., None]
    rotate_heads: Callable[..., None]
    tree_attention: Callable[..., None]
    recurrent_commit: Callable[..., None]
    kv_commit: Callable[..., None]
    sample: Callable[..., None]
    accept_walk: Callable[..., None]

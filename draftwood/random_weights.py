"""Weights from a configuration alone, for measuring a shape whose checkpoint is not there.

Each tensor depends on its name, shape and format and on the kind of device, so that two processes make the same one.
Values are drawn on the device in the format that is served, with no other copy: a large model takes its own size and
no more.

    products and embeddings: normal, variance 1 / inputs, so that a unit vector stays one
    norms: the identity      biases and sinks: 0      A_log, dt_bias, D: as recurrent layers are initialised
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

_LEAST_STEP, _LARGEST_STEP = 1e-3, 1e-1  # of a recurrent layer's time step; Mamba's published range


def random_tensor(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, is_centred: bool = False
) -> Tensor:
    """The tensor of that name. `is_centred`: its norm multiplies with 1 + the weight."""
    leaf = name.rsplit(".", 1)[-1]
    out = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "meta":
        return out
    generator = torch.Generator(device).manual_seed(_seed(name))
    if leaf == "A_log":
        return out.uniform_(1.0, 16.0, generator=generator).log_()
    if leaf == "dt_bias":
        steps = torch.empty(shape, device=device).uniform_(_LEAST_STEP, _LARGEST_STEP, generator=generator)
        return out.copy_(steps.expm1_().log_())  # softplus of it is the step
    if len(shape) > 1:
        return out.normal_(0.0, 1.0 / math.sqrt(shape[-1]), generator=generator)
    is_factor = leaf == "D" or (leaf == "weight" and not is_centred)
    return out.fill_(1.0 if is_factor else 0.0)


def random_tensors(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device, *, owner: str
) -> dict[str, Tensor]:
    """Tensors of a model by name; `owner` keeps those of two models with equal names apart."""
    return {name: random_tensor(f"{owner}/{name}", shape, dtype, device) for name, shape in shapes.items()}


def random_checksum(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """SHA-256 over names and shapes, hexadecimal: what decides random tensors."""
    return hashlib.sha256(repr(sorted(shapes.items())).encode()).hexdigest()


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1

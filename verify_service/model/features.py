"""Feature rows: hidden states behind some of the target's layers, projected with the drafter's own fc and hidden_norm.

    row = hidden_norm(fc(concat of hidden_states[id + 1] for the target layer ids))     (DFlash, arXiv 2602.06036)

Projected on this side, a committed token costs hidden_size values on the wire instead of layers x hidden_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftwood.checkpoint import default_target_layer_ids, load_tensors, projection_checksum, read_config
from draftwood.device.layers import PackedLinear, RMSNorm
from draftwood.errors import ModelMismatchError, UnsupportedModelError
from draftwood.random_weights import random_checksum, random_tensors
from verify_service.core.target_spec import TargetSpec


@dataclass(frozen=True, slots=True)
class FeatureProjector:
    """fc and hidden_norm, and the layers they read."""

    target_layer_ids: tuple[int, ...]
    hidden_size: int  # F
    checksum: str
    fc: PackedLinear
    hidden_norm: RMSNorm

    def project(self, target_features: Tensor) -> Tensor:
        """[P, num_layers * H] to [P, F]."""
        return self.hidden_norm(self.fc(target_features))


def load_projector(
    directory: Path, spec: TargetSpec, dtype: torch.dtype, device: torch.device, *, random_weights: bool = False
) -> FeatureProjector:
    """Reads fc and hidden_norm, and only these, from a draft checkpoint. Raises where they do not fit the target."""
    config = read_config(directory)
    ids = (config.get("dflash_config") or {}).get("target_layer_ids", config.get("target_layer_ids"))
    if ids is None:
        ids = default_target_layer_ids(config["num_hidden_layers"], spec.num_layers)
    ids = tuple(int(i) for i in ids)
    if any(not 0 <= i < spec.num_layers for i in ids):
        raise ModelMismatchError(
            f"the draft model reads target layers {list(ids)}; the target has {spec.num_layers}",
            field="target_layer_ids",
        )
    if random_weights:
        width = int(config["hidden_size"])
        shapes = {"fc.weight": (width, len(ids) * spec.hidden_size), "hidden_norm.weight": (width,)}
        tensors, checksum = random_tensors(shapes, dtype, device, owner="draft"), random_checksum(shapes)
    else:
        tensors = load_tensors(directory, ("fc.weight", "hidden_norm.weight"))
        checksum = projection_checksum(directory)
    fc, norm = tensors["fc.weight"], tensors["hidden_norm.weight"]
    if fc.shape[1] != len(ids) * spec.hidden_size:
        raise ModelMismatchError(
            f"the draft model's fc takes {fc.shape[1]} values, not {len(ids)} x the target's hidden size "
            f"{spec.hidden_size}",
            field="fc.weight",
        )
    if norm.shape != (fc.shape[0],):
        raise UnsupportedModelError(f"hidden_norm.weight has shape {list(norm.shape)}", field="hidden_norm.weight")
    hidden_norm = RMSNorm(norm.to(device), float(config.get("rms_norm_eps", 1e-6)))
    return FeatureProjector(ids, fc.shape[0], checksum, PackedLinear(fc.to(dtype=dtype, device=device)), hidden_norm)

"""The target's draws at the nodes of a batch of trees, by draftwood.sampling."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from draftwood.noise import NoiseCache
from draftwood.sampling import SamplingParams, draw
from verify_service.kernels.arguments import DrawSettings, TreeMetadata


def sample(logits: Tensor, tree: TreeMetadata, settings: DrawSettings, drawn: Tensor, *, has_filters: bool) -> None:
    """One node after another. Whether a row has filters is seen from its settings."""
    del has_filters
    noise = NoiseCache(logits.shape[-1])
    drawn.zero_()
    for row, count in enumerate(tree.num_nodes.tolist()):
        params = _params_of(settings, row)
        for node in range(count):
            values = logits[row, node].float().cpu().numpy()
            is_sound = np.isfinite(values.max())
            drawn[row, node] = draw(values, params, int(tree.positions[row, node]) + 1, noise) if is_sound else -1


def _params_of(settings: DrawSettings, row: int) -> SamplingParams:
    return SamplingParams(
        temperature=float(settings.temperature[row]),
        top_k=int(settings.top_k[row]),
        top_p=float(settings.top_p[row]),
        min_p=float(settings.min_p[row]),
        seed=int(settings.seeds[row]) & (2**64 - 1),
    )

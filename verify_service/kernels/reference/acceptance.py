"""The target's draws at the nodes of a batch of trees, by draftwood.sampling, and the walks along them, by
verify_service.core.accept."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from draftwood.noise import NoiseCache
from draftwood.sampling import SamplingParams, draw
from draftwood.tree import DraftTree
from verify_service.core.accept import accept
from verify_service.kernels.arguments import FINISHES, NO_DRAW, DrawSettings, Outcome, TreeMetadata


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


def accept_walk(input_ids: Tensor, tree: TreeMetadata, drawn: Tensor, settings: DrawSettings, outcome: Outcome) -> None:
    """One row after another; a node without a draw ends a walk as a stop token does."""
    outcome.path.zero_()
    outcome.tokens.fill_(-1)
    outcome.path_length.zero_()
    outcome.finish.zero_()
    for row, n in enumerate(tree.num_nodes.tolist()):
        if not n:
            continue
        ids, parents, tokens = (t[row, :n].tolist() for t in (input_ids, tree.parents, drawn))
        nodes = DraftTree.from_nodes(ids[0], ids[1:], parents[1:], [0.0] * (n - 1))
        stops = {-1, *settings.stop_ids[row].tolist()}
        walk = accept(nodes, tokens.__getitem__, stop_token_ids=stops, max_tokens=int(settings.remaining[row]))
        count = min(len(walk.path), outcome.path.shape[1])
        finish = FINISHES.index(walk.finish) if count == len(walk.path) else 0  # a cut walk goes on in the next step
        if walk.tokens[count - 1] < 0:
            finish = NO_DRAW
        outcome.path[row, :count] = torch.tensor(walk.path[:count], dtype=torch.int32)
        outcome.tokens[row, :count] = torch.tensor(walk.tokens[:count], dtype=torch.int32)
        outcome.path_length[row] = 0 if finish else count
        outcome.finish[row] = finish

"""The likeliest tokens of every depth of a block, with draftwood.noise and torch."""

from __future__ import annotations

import torch
from torch import Tensor

from draft_service.kernels.arguments import Candidates, TreeSettings
from draftwood.noise import gumbel


def likeliest(
    logits: Tensor,  # [S, depths, V]
    settings: TreeSettings,
    candidates: Candidates,  # written
) -> None:
    """A stable sort sends ties to the lower id."""
    s, depths, v = logits.shape
    own = logits.float()
    for i in range(s):
        ranked, temperature = own[i].clone(), float(settings.temperature[i])
        seed, base = int(settings.seeds[i]) & (2**64 - 1), int(settings.base_lengths[i])
        for depth in range(depths if temperature > 0 else 0):
            ranked[depth] += temperature * torch.from_numpy(gumbel(seed, base + depth + 1, v)).to(ranked.device)
        order = ranked.sort(dim=-1, descending=True, stable=True)
        top, ids = (part[:, : candidates.token_ids.shape[-1]] for part in order)
        candidates.token_ids[i] = ids.to(torch.int32)
        candidates.scores[i] = top - ranked.logsumexp(-1, keepdim=True)
        candidates.log_probs[i] = own[i].gather(-1, ids) - own[i].logsumexp(-1, keepdim=True)

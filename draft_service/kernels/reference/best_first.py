"""Best-first trees of a batch, by draftwood.tree."""

from __future__ import annotations

import torch

from draft_service.kernels.arguments import Candidates, TreeNodes, TreeSettings
from draftwood import tree


def best_first(settings: TreeSettings, candidates: Candidates, trees: TreeNodes) -> None:
    """One sequence after another."""
    for i, (root, budget, width, spine) in enumerate(
        zip(*(t.tolist() for t in (settings.roots, settings.budgets, settings.widths, settings.spines)), strict=True)
    ):
        ids, scores, log_probs = (
            part[i, :, :width].tolist() for part in (candidates.token_ids, candidates.scores, candidates.log_probs)
        )
        most = min(budget, trees.token_ids.shape[1] - 1)
        made = tree.best_first(root, ids, scores, most, log_probs=log_probs, spine=bool(spine))
        for out, spare, nodes in (
            (trees.token_ids, 0, made.token_ids),
            (trees.parents, -1, made.parents),
            (trees.depths, 0, made.depths),
            (trees.log_probs, 0.0, made.log_probs),
        ):
            out[i] = spare
            out[i, : made.num_nodes] = torch.tensor(nodes, dtype=out.dtype)
        trees.num_nodes[i] = made.num_nodes

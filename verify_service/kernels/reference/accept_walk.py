"""The accept walk of a batch, by verify_service.core.accept."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.tree import DraftTree
from verify_service.core.accept import accept
from verify_service.kernels.arguments import FINISHES, NO_DRAW, DrawSettings, Outcome, TreeMetadata


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

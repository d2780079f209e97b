"""Draws the target's tokens at the nodes of one tree, on demand: an accept walk visits few of them."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.errors import InternalError
from draftwood.noise import NoiseCache
from draftwood.sampling import draw
from draftwood.tree import DraftTree
from verify_service.core.events import TokenLogProbs
from verify_service.core.sequence import SequenceState


class NodeSampler:
    """The draw at a node is a function of its logits, the request's settings and its position alone.

    Raises InternalError where the logits are no distribution.
    """

    def __init__(
        self,
        sequence: SequenceState,
        tree: DraftTree,
        logits: Tensor,  # [N, vocab_size]
        noise: NoiseCache,
        *,
        first_position: int,  # that the draw at the root is for
    ) -> None:
        self.sequence, self.tree, self.logits, self.noise = sequence, tree, logits, noise
        self.first_position = first_position
        self.log_probs: list[TokenLogProbs] = []

    def __call__(self, node: int) -> int:
        sequence, request = self.sequence, self.sequence.request
        depth = self.tree.depths[node]
        position = self.first_position + depth
        allowed = row = finite_row(self.logits[node], position)
        if len(sequence.answer) + depth < request.min_new_tokens:
            allowed = row.copy()
            allowed[list(request.stop_token_ids)] = -np.inf
        counts = None
        if request.sampling.has_penalties:
            counts = sequence.counts([self.tree.token_ids[i] for i in self.tree.path_to(node)[1:]])
        token = draw(allowed, request.sampling, position, self.noise, counts)
        if request.num_log_probs is not None:
            self.log_probs.append(log_probs_of(row, token, request.num_log_probs))
        return token


def finite_row(
    logits: Tensor,  # [vocab_size]
    position: int,  # that they are for
) -> NDArray[np.float32]:
    """The logits as float32 numpy; torch's own arg-max is several times slower on a CPU. Raises InternalError where
    they are no distribution."""
    row: NDArray[np.float32] = logits.to(torch.float32).cpu().numpy()
    if not math.isfinite(largest := float(row.max())):  # NaN where any of them is
        raise InternalError(
            f"the target's logits are not finite at position {position} of this request (the largest is {largest}): "
            "its context overflows the number format, or a weight is damaged"
        )
    return row


def log_probs_of(
    logits: NDArray[np.float32],  # [vocab_size]
    token: int,
    num_top: int,
) -> TokenLogProbs:
    """Log-probability of a token and the likeliest ones, in float64."""
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    top: list[int] = []
    if num_top:
        head = np.argpartition(-values, num_top - 1)[:num_top]
        top = head[np.lexsort((head, -values[head]))].tolist()
    return TokenLogProbs(token, float(values[token]), tuple((i, float(values[i])) for i in top))

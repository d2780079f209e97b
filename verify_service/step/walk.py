"""The walk along a verified tree, by the target's draws on the host: which nodes are accepted, and what is emitted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from draftwood.errors import DraftwoodError
from draftwood.noise import NoiseCache
from draftwood.tree import DraftTree
from verify_service.core.accept import Accepted, accept
from verify_service.core.events import TokenLogProbs
from verify_service.core.sequence import SequenceState
from verify_service.step.sampler import NodeSampler
from verify_service.step.shadow import chain_of, tree_of

log = logging.getLogger(__name__)


class SequenceTree(NamedTuple):
    """A sequence, and the tree that a step verifies for it."""

    sequence: SequenceState
    tree: DraftTree


@dataclass(frozen=True, slots=True)
class Walk:
    """What became of one sequence's tree."""

    tree: DraftTree  # what was walked: in shadow-linear mode the chain
    accepted: Accepted
    log_probs: tuple[TokenLogProbs, ...] = ()
    shadow_path: tuple[int, ...] = ()  # nodes of the verified tree
    error: DraftwoodError | None = None  # what ends the request instead

    @property
    def goes_on(self) -> bool:
        """Whether the answer does, so that the path is committed."""
        return self.accepted.finish is None and self.error is None


def walk_tree(
    entry: SequenceTree,
    logits: Tensor,  # [N, vocab_size]
    noise: NoiseCache,
    *,
    first_position: int,  # that the draw at the root is for
) -> Walk:
    """A sequence that cannot be drawn for does not keep others from their walks: its error is in the walk."""
    sequence, tree = entry
    request = sequence.request
    sampler = NodeSampler(sequence, tree, logits, noise, first_position=first_position)

    def walk(part: DraftTree, draw: Callable[[int], int]) -> Accepted:
        return accept(part, draw, stop_token_ids=request.stop_token_ids, max_tokens=max(sequence.num_remaining, 1))

    try:
        if not (request.shadow_linear and tree.num_nodes > 1):
            return Walk(tree, walk(tree, sampler), tuple(sampler.log_probs))
        chain, (shadow, nodes) = chain_of(tree, request.tree_budget), tree_of(tree, request.tree_budget)
        accepted = walk(chain, sampler)
        log_probs = tuple(sampler.log_probs)
        path = walk(shadow, lambda node: sampler(nodes[node])).path
        return Walk(chain, accepted, log_probs, tuple(nodes[node] for node in path))
    except DraftwoodError as error:
        log.warning("request %s: %s", request.request_id, error.message)
        return Walk(tree, Accepted((0,), (), None), error=error)

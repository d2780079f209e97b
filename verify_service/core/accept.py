"""The accept walk: which nodes of a verified tree the target's own draws follow. Pure; nothing is committed here.

    at each node draw the target's token; follow the child that carries it; stop where there is none.

Every emitted token is the target's draw in its own context, whatever the tree, so the walk is lossless (DDTree,
arXiv 2604.12989, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum

from draftwood.tree import DraftTree


class Finish(Enum):
    """Why an answer ends."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Accepted:
    """Outcome of a walk. `path` starts with the root and holds the nodes to commit; the last of `tokens` is the bonus
    token, the next root, so both have the same length: the acceptance length."""

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    finish: Finish | None


def accept(
    tree: DraftTree, draw: Callable[[int], int], *, stop_token_ids: Collection[int], max_tokens: int
) -> Accepted:
    """Walks from the root; `draw(node)` is the target's token after `node`.

    The walk is cut at the first stop token and after `max_tokens` tokens (at least 1), because a recurrent commit
    cannot be undone.
    """
    children = {(parent, token): i for i, (parent, token) in enumerate(zip(tree.parents, tree.token_ids, strict=True))}
    path, tokens = [0], list[int]()
    while True:
        token = draw(path[-1])
        tokens.append(token)
        if token in stop_token_ids:
            return Accepted(tuple(path), tuple(tokens), Finish.STOP)
        if len(tokens) >= max_tokens:
            return Accepted(tuple(path), tuple(tokens), Finish.LENGTH)
        child = children.get((path[-1], token))
        if child is None:
            return Accepted(tuple(path), tuple(tokens), None)
        path.append(child)

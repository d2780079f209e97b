"""The accept walk: the kernel against verify_service.core.accept."""

import random
from collections.abc import Callable, Sequence
from dataclasses import fields

import pytest
import torch

from benchmarks.kernels.draw_settings import draw_settings_of
from benchmarks.kernels.trees import metadata_of
from draftwood.errors import MalformedTreeError
from draftwood.sampling import SamplingParams
from draftwood.tree import DraftTree
from verify_service.kernels.arguments import DrawSettings, Outcome
from verify_service.kernels.reference import acceptance as reference
from verify_service.kernels.triton.acceptance import accept_walk

VOCABULARY = 4  # few tokens, so that draws meet children often


def random_tree(rng: random.Random, num_nodes: int) -> DraftTree:
    """A tree whose siblings differ."""
    tree = DraftTree.root_only(rng.randrange(VOCABULARY))
    while tree.num_nodes < num_nodes:
        token, parent = rng.randrange(VOCABULARY), rng.randrange(tree.num_nodes)
        ids, parents = (*tree.token_ids[1:], token), (*tree.parents[1:], parent)
        try:
            tree = DraftTree.from_nodes(tree.token_ids[0], ids, parents, [0.0] * len(ids))
        except MalformedTreeError:
            continue
    return tree


def draws(rng: random.Random, tree: DraftTree, n: int) -> list[int]:
    """A token for each of `n` nodes, mostly one of a child."""
    drawn = [rng.randrange(VOCABULARY) for _ in range(n)]
    for child in range(1, tree.num_nodes):
        if rng.random() < 0.7:
            drawn[tree.parents[child]] = tree.token_ids[child]
    return drawn


def settings(stop_ids: Sequence[Sequence[int]], remaining: Sequence[int], device: torch.device) -> DrawSettings:
    return draw_settings_of([SamplingParams()] * len(remaining), device, stop_ids=stop_ids, remaining=remaining)


def outcome(b: int, d: int, device: torch.device) -> Outcome:
    """Poisoned."""
    shapes = ((b, d), (b,), (b, d), (b,))
    return Outcome(*(torch.full(shape, -99, dtype=torch.int32, device=device) for shape in shapes))


def lists(decided: Outcome) -> dict[str, list[int]]:
    return {field.name: getattr(decided, field.name).tolist() for field in fields(decided)}


@pytest.mark.parametrize(("n", "d"), [(1, 16), (13, 16), (40, 5)])
def test_walks_are_those_of_the_definition(device: torch.device, n: int, d: int) -> None:
    rng, b = random.Random(n), 24
    trees = [random_tree(rng, rng.randint(1, n)) for _ in range(b)]
    metadata = metadata_of([tree.parents for tree in trees], n, device)
    metadata.num_nodes[-1] = 0
    # Spare nodes carry a token that is drawn, and the root as their parent: only num_nodes keeps the walk off them.
    ids = torch.ones(b, n, dtype=torch.int64)
    for i, tree in enumerate(trees):
        ids[i, : tree.num_nodes] = torch.tensor(tree.token_ids)
        metadata.parents[i, tree.num_nodes :] = 0
    drawn = torch.tensor([draws(rng, tree, n) for tree in trees], dtype=torch.int32)
    drawn[1::4, n // 3] = -1
    stops = [[3, -1, -1] if i % 3 == 0 else [-1, -1, -1] for i in range(b)]
    limits = settings(stops, [rng.randint(1, 9) for _ in range(b)], device)
    got, want = outcome(b, d, device), outcome(b, d, device)
    accept_walk(ids.to(device), metadata, drawn.to(device), limits, got)
    reference.accept_walk(ids.to(device), metadata, drawn.to(device), limits, want)
    assert lists(got) == lists(want)
    if n > 1:
        assert {0, 1, 2, 3} == set(got.finish.tolist())
        assert max(got.path_length.tolist()) > 2


CHAIN = ((5, 6, 7), (-1, 0, 1))  # token ids and parents


@pytest.mark.parametrize("walk", [accept_walk, reference.accept_walk], ids=["kernel", "twin"])
@pytest.mark.parametrize(
    ("drawn", "stops", "remaining", "wanted"),
    [
        ((6, 7, 9), (9, -1), 10, {"path": [[0, 1, 2, 0]], "tokens": [[6, 7, 9, -1]], "finish": [1]}),
        # Lists of stop tokens are padded with the number that means no draw.
        ((6, -1, 9), (9, -1), 2, {"path": [[0, 1, 0, 0]], "tokens": [[6, -1, -1, -1]], "finish": [3]}),
    ],
    ids=["a stop token", "a node without a draw"],
)
def test_a_walk_that_ends_commits_nothing(
    device: torch.device,
    walk: Callable[..., None],
    drawn: tuple[int, ...],
    stops: tuple[int, ...],
    remaining: int,
    wanted: dict[str, list[int]],
) -> None:
    token_ids, parents = CHAIN
    got, ids = outcome(1, 4, device), torch.tensor([token_ids], device=device)
    at_nodes = torch.tensor([drawn], dtype=torch.int32, device=device)
    walk(ids, metadata_of([parents], 3, device), at_nodes, settings([stops], [remaining], device), got)
    assert lists(got) == wanted | {"path_length": [0]}

"""The accept walk: the kernel against verify_service.core.accept."""

import random

import pytest
import torch

from draftwood.errors import MalformedTreeError
from draftwood.tree import DraftTree
from verify_service.kernels.triton.accept_walk import accept_walk, accept_walk_plain

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


def outcome(b: int, d: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Poisoned."""
    shapes = ((b, d), (b,), (b, d), (b,))
    return tuple(torch.full(shape, -99, dtype=torch.int32, device=device) for shape in shapes)


@pytest.mark.parametrize(("n", "d"), [(1, 16), (13, 16), (40, 5)])
def test_walks_are_those_of_the_definition(device: torch.device, n: int, d: int) -> None:
    rng, b = random.Random(n), 24
    trees = [random_tree(rng, rng.randint(1, n)) for _ in range(b)]
    # Spare nodes carry a token that is drawn, and the root as their parent: only num_nodes keeps the walk off them.
    ids, parents = torch.ones(b, n, dtype=torch.int64), torch.zeros(b, n, dtype=torch.int32)
    for i, tree in enumerate(trees):
        ids[i, : tree.num_nodes], parents[i, : tree.num_nodes] = (
            torch.tensor(values) for values in (tree.token_ids, tree.parents)
        )
    counts = [tree.num_nodes for tree in trees[:-1]] + [0]
    drawn = torch.tensor([draws(rng, tree, n) for tree in trees], dtype=torch.int32)
    drawn[1::4, n // 3] = -1
    stops = torch.tensor([[3, -1, -1] if i % 3 == 0 else [-1, -1, -1] for i in range(b)], dtype=torch.int32)
    remaining = torch.tensor([rng.randint(1, 9) for _ in range(b)], dtype=torch.int32)
    inputs = (ids, parents, torch.tensor(counts, dtype=torch.int32), drawn, stops, remaining)
    inputs = tuple(tensor.to(device) for tensor in inputs)
    got, want = outcome(b, d, device), outcome(b, d, device)
    accept_walk(*inputs, got)  # type: ignore[arg-type]
    accept_walk_plain(*inputs, want)  # type: ignore[arg-type]
    for name, g, w in zip(("path", "path_length", "tokens", "finish"), got, want, strict=True):
        assert g.tolist() == w.tolist(), name
    if n > 1:
        assert {0, 1, 2, 3} == set(got[3].tolist())
        assert max(got[1].tolist()) > 2


def test_a_cut_walk_commits_nothing(device: torch.device) -> None:
    def row(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor([values], dtype=dtype, device=device)

    got = outcome(1, 4, device)
    accept_walk(
        row(5, 6, 7, dtype=torch.int64), row(-1, 0, 1), row(3)[0], row(6, 7, 9), row(9, -1), row(10)[0],
        (got[0], got[1], got[2], got[3]),
    )  # fmt: skip
    assert [part.tolist() for part in got] == [[[0, 1, 2, 0]], [0], [[6, 7, 9, -1]], [1]]


def test_a_node_without_a_draw_ends_the_walk(device: torch.device) -> None:
    """Also where lists of stop tokens are padded with the number that means none."""
    ids, parents = torch.tensor([[5, 6, 7]], device=device), torch.tensor([[-1, 0, 1]], device=device).int()
    counts, drawn = torch.tensor([3], device=device).int(), torch.tensor([[6, -1, 9]], device=device).int()
    stops, remaining = torch.tensor([[9, -1]], device=device).int(), torch.tensor([2], device=device).int()
    for walk in (accept_walk, accept_walk_plain):
        got = outcome(1, 4, device)
        walk(ids, parents, counts, drawn, stops, remaining, (got[0], got[1], got[2], got[3]))
        assert [part.tolist() for part in got] == [[[0, 1, 0, 0]], [0], [[6, -1, -1, -1]], [3]]

"""Packing and unpacking, and untrusted trees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.errors import InvalidRequestError, MalformedTreeError
from draftwood.rpc.wire import sampling_from_wire, sampling_to_wire, tree_from_wire, tree_to_wire
from draftwood.sampling import SamplingParams
from draftwood.tree import DraftTree
from draftwood.v1 import sampling_pb2, tree_pb2


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    n = draw(st.integers(0, 70))
    parents = [draw(st.integers(0, i)) for i in range(n)]
    return DraftTree.from_nodes(5, list(range(100, 100 + n)), parents, [-0.5] * n)


@given(trees())
def test_trees_survive_the_wire(tree: DraftTree) -> None:
    message = tree_pb2.DraftTree.FromString(tree_to_wire(tree).SerializeToString())
    assert tree_from_wire(message, 5, vocab_size=200, tree_budget=70, max_depth=70) == tree


def packed(ids: list[int], parents: list[int], log_probs: list[float]) -> tree_pb2.DraftTree:
    return tree_pb2.DraftTree(
        token_ids=np.array(ids, "<i4").tobytes(),
        parents=np.array(parents, "<i2").tobytes(),
        log_probs=np.array(log_probs, "<f4").tobytes(),
    )


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (packed([1], [0], []), "bytes"),
        (tree_pb2.DraftTree(token_ids=b"abc"), "bytes"),
        (packed([1] * 9, list(range(9)), [0.0] * 9), "more than the 8"),
        (packed([200], [0], [0.0]), "token id"),
        (packed([-1], [0], [0.0]), "token id"),
        (packed([1], [1], [0.0]), "parents"),
        (packed([1], [-1], [0.0]), "parents"),
        (packed([1], [0], [float("nan")]), "finite"),
        (packed([1, 1], [0, 0], [0.0, 0.0]), "sibling"),
        (packed([1, 2, 3, 4], [0, 1, 2, 3], [0.0] * 4), "deep"),
    ],
    ids=["lengths", "odd bytes", "budget", "vocabulary", "negative", "self", "below root", "nan", "twins", "depth"],
)
def test_malformed_trees_are_rejected(message: tree_pb2.DraftTree, words: str) -> None:
    with pytest.raises(MalformedTreeError, match=words):
        tree_from_wire(message, 5, vocab_size=200, tree_budget=8, max_depth=3)


def test_sampling_survives_the_wire() -> None:
    params = SamplingParams(
        temperature=0.5,
        top_p=0.75,
        top_k=40,
        min_p=0.125,
        seed=2**63 + 5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        logit_bias={3: 1.0},
    )
    assert sampling_from_wire(sampling_to_wire(params), seed=0, vocab_size=10) == params


def test_absent_sampling_fields_are_neutral() -> None:
    assert sampling_from_wire(sampling_pb2.SamplingParams(), seed=4, vocab_size=10) == SamplingParams(seed=4)


def test_bad_sampling_is_refused() -> None:
    message = sampling_pb2.SamplingParams(logit_bias=[sampling_pb2.LogitBias(token_id=10)])
    with pytest.raises(InvalidRequestError, match="token 10"):
        sampling_from_wire(message, seed=0, vocab_size=10)
    with pytest.raises(InvalidRequestError, match="top_k is 0"):
        sampling_from_wire(sampling_pb2.SamplingParams(top_k=0), seed=0, vocab_size=10)

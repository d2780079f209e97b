"""How layers are cut into stretches, and which of them share a graph."""

from __future__ import annotations

from verify_service.model.layer_groups import Stretches


def test_pattern_of_layers_shares_one_graph() -> None:
    stretches = Stretches(list("abcdefghi"), [*("g", "g", "g", "a") * 2, "g"], compile_steps=True).cut(4)
    assert [s.layers for s in stretches] == [tuple("abcd"), tuple("efgh"), ("i",)]
    assert [s.first for s in stretches] == [0, 4, 8]
    assert stretches[0].run is stretches[1].run
    assert stretches[0].run is not stretches[2].run


def test_layer_of_no_graph_stands_alone_and_shares_none() -> None:
    """A dense layer and one of experts may have the same mixer; a graph of the one must not run the other."""
    stretches = Stretches(list("abcd"), ["g", "g", None, "g"], compile_steps=True)
    alone, several = stretches.cut(4), stretches.cut(1)
    assert [s.layers for s in alone] == [("a", "b"), ("c",), ("d",)]
    assert [s.layers for s in several] == [("a",), ("b",), ("c",), ("d",)]
    assert several[0].run is several[3].run is alone[2].run
    assert several[2].run is alone[1].run
    assert several[2].run is not several[0].run

"""How layers are cut into layer_groups, and which of them share a graph."""

from __future__ import annotations

from verify_service.model.layer_groups import LayerGroups


def test_pattern_of_layers_shares_one_graph() -> None:
    layer_groups = LayerGroups(list("abcdefghi"), [*("g", "g", "g", "a") * 2, "g"], compile_steps=True).group_layers(4)
    assert [s.layers for s in layer_groups] == [tuple("abcd"), tuple("efgh"), ("i",)]
    assert [s.first for s in layer_groups] == [0, 4, 8]
    assert layer_groups[0].run is layer_groups[1].run
    assert layer_groups[0].run is not layer_groups[2].run


def test_layer_of_no_graph_stands_alone_and_shares_none() -> None:
    """A dense layer and one of experts may have the same mixer; a graph of the one must not run the other."""
    layer_groups = LayerGroups(list("abcd"), ["g", "g", None, "g"], compile_steps=True)
    alone, several = layer_groups.group_layers(4), layer_groups.group_layers(1)
    assert [s.layers for s in alone] == [("a", "b"), ("c",), ("d",)]
    assert [s.layers for s in several] == [("a",), ("b",), ("c",), ("d",)]
    assert several[0].run is several[3].run is alone[2].run
    assert several[2].run is alone[1].run
    assert several[2].run is not several[0].run

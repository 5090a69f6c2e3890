"""Nodes of nested dicts by the names that lead to them."""

from jax_fp8.core.paths import at_path, put_at_path


def test_a_node_is_found_where_its_names_lead():
    tree = {"layer": {"dense": {"kernel": 3}}}
    assert at_path(tree, ("layer", "dense", "kernel")) == 3
    assert at_path(tree, ()) is tree
    assert at_path(tree, ("layer", "other", "kernel")) is None
    assert at_path(tree, ("layer", "dense", "kernel", "deeper")) is None


def test_a_node_is_added_to_what_stands_there():
    tree = {"layer": {"dense": {"kernel": 3}}}
    put_at_path(tree, ("layer", "dense"), {"bias": 4})
    put_at_path(tree, ("other",), {"kernel": 5})
    assert tree == {"layer": {"dense": {"kernel": 3, "bias": 4}}, "other": {"kernel": 5}}

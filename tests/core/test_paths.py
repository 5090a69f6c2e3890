"""Nodes of nested dicts by the names that lead to them, and the kernels of a GEMM by its name."""

import jax
import pytest

from jax_fp8.core.paths import (
    UNNAMED,
    at_path,
    experts_name,
    is_of_experts,
    joined_name,
    kernel_paths,
    kernelless_name,
    map_with_names,
    names_of,
    put_at_path,
    shown,
)


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


@pytest.mark.parametrize(
    ("gemm", "kernels"),
    [
        ((), [("kernel",)]),
        (("dense",), [("dense", "kernel")]),
        (("layer_0", "query", UNNAMED), []),
        (("layer_0", "attention", kernelless_name("scores")), []),
        (("layer_0", "mlp", "+gate+up"), [("layer_0", "mlp", "gate", "kernel"), ("layer_0", "mlp", "up", "kernel")]),
        (("mlp", experts_name(("down",))), [("mlp", "down", "kernel")]),
        (("layer_0", "mlp", "gate+up"), [("layer_0", "mlp", "gate", "kernel"), ("layer_0", "mlp", "up", "kernel")]),
    ],
)
def test_the_kernels_of_a_gemm(gemm, kernels):
    assert kernel_paths(gemm) == tuple(kernels)


@pytest.mark.parametrize(
    ("gemm", "found"), [((), False), (("mlp", "up"), False), (("mlp", "+up"), True), (("mlp", UNNAMED), False)]
)
def test_a_gemm_of_experts_is_known_by_its_name(gemm, found):
    assert is_of_experts(gemm) is found
    assert shown(gemm) == (("mlp", "up") if found else gemm)


def test_a_name_of_several_layers():
    assert joined_name(("query", "key", "value")) == "query+key+value"
    assert joined_name(("up",)) == "up"
    assert experts_name(("gate", "up")) == "+gate+up"


def test_leaves_are_mapped_with_their_names():
    tree = {"b": {"kernel": 1}, "a": 2}
    assert map_with_names(lambda names, x, y: (*names, x + y), tree, tree) == {
        "b": {"kernel": ("b", "kernel", 2)},
        "a": ("a", 4),
    }
    paths = [names_of(path) for path, _ in jax.tree_util.tree_leaves_with_path([tree])]
    assert paths == [(None, "a"), (None, "b", "kernel")]

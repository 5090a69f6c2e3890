"""Checks of what a user gives: what passes, the sentence for what does not, and where two trees differ first."""

from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict

from jax_fp8.core.checks import check_bool, check_integer, check_number, describe, first_difference

pytestmark = pytest.mark.versions

Pair = namedtuple("Pair", ("a", "b"))
Other = namedtuple("Other", ("a", "b"))


@pytest.mark.parametrize("value", [1, 7, np.int64(7), np.uint8(1)])
def test_integers_pass(value):
    check_integer("size", value)
    check_integer("size", value, least=0, most=7)


@pytest.mark.parametrize(
    ("value", "end"),
    [
        (0, "got 0"),
        (-16, "got -16"),
        (64.0, "got 64.0; pass 64"),
        (np.float32(4), r"got np.float32\(4.0\); pass 4"),
        (1.5, "got 1.5"),
        (float("inf"), "got inf"),
        (float("nan"), "got nan"),
        ("64", "got '64'"),
        (True, "got True"),
        (None, "got None"),
        ((16,), r"got \(16,\)"),
    ],
)
def test_what_is_no_size(value, end):
    with pytest.raises(ValueError, match=f"^size must be an integer of at least 1, {end}$"):
        check_integer("size", value)


def test_bounds_of_an_integer():
    check_integer("margin", -16, -16, 16)
    with pytest.raises(ValueError, match=r"^margin must be an integer from -16 to 16, got 17$"):
        check_integer("margin", 17, -16, 16)


@pytest.mark.parametrize("value", [0, 0.5, np.float64(1e-3), np.int32(3)])
def test_numbers_pass(value):
    check_number("decay", value, "that is not negative", lambda x: x >= 0)


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan"), 1e39, "0.1", None, True, np.ones(3), 1j])
def test_what_is_no_number(value):
    with pytest.raises(ValueError, match=r"^decay must be a finite number that is not negative, got .*; leave it out$"):
        check_number("decay", value, "that is not negative", lambda x: x >= 0, "leave it out")


def test_a_number_must_hold_in_float32():
    with pytest.raises(ValueError, match="must be a finite number above 0, got 1e-60"):
        check_number("eps", 1e-60, "above 0", lambda x: x > 0)


def test_flags():
    check_bool("causal", True)
    check_bool("causal", np.False_)
    for value in ("no", 1, None):
        with pytest.raises(ValueError, match=f"^causal must be True or False, got {value!r}$"):
            check_bool("causal", value)


def test_descriptions():
    shape = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
    trees = [shape, np.float32(1), {"b": 1, "a": 2}, dict.fromkeys("abcde"), {}, None, Pair(1, 2)]
    assert [describe(tree) for tree in trees] == [
        "bfloat16[4, 8]",
        "float32[]",
        "a dict with 'b', 'a'",
        "a dict with 'a', 'b', 'c', 'd', ...",
        "an empty dict",
        "None",
        "a Pair",
    ]


TREE = {"a": {"kernel": np.ones((2, 3), np.float32), "bias": None}, "b": Pair(np.int32(1), [np.int32(2)])}


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (TREE, None),
        (jax.tree.map(jnp.asarray, TREE), None),
        (TREE | {"c": 1}, "['c'] does not belong there"),
        ({"b": TREE["b"]}, "['a'] is missing"),
        ({"A": TREE["a"], "b": TREE["b"]}, "['a'] is missing, ['A'] is new"),
        (TREE | {"a": TREE["a"] | {"bias": np.float32(1)}}, "['a']['bias'] must be None, got float32[]"),
        (TREE | {"a": np.ones(3)}, "['a'] must be a dict with 'kernel', 'bias', got float64[3]"),
        (
            TREE | {"a": FrozenDict(TREE["a"])},
            "['a'] must be a dict with 'kernel', 'bias', got a FrozenDict with 'kernel', 'bias'",
        ),
        (
            TREE | {"a": TREE["a"] | {"kernel": np.ones((3, 2), np.float32)}},
            "['a']['kernel'] must be float32[2, 3], got float32[3, 2]",
        ),
        (TREE | {"a": TREE["a"] | {"kernel": {"x": 1}}}, "['a']['kernel'] must be float32[2, 3], got a dict with 'x'"),
        (TREE | {"b": Other(*TREE["b"])}, "['b'] must be a Pair, got a Other"),
        (TREE | {"b": TREE["b"]._replace(b=[])}, "['b'].b[0] is missing"),
        (3.0, "the tree must be a dict with 'a', 'b', got a float"),
    ],
)
def test_the_first_difference(other, difference):
    assert first_difference(TREE, other) == difference


def test_a_difference_of_structure_only():
    bigger = TREE | {"a": TREE["a"] | {"kernel": np.ones((7, 7))}}
    assert first_difference(TREE, bigger, arrays=False) is None
    assert first_difference(TREE, TREE | {"c": 1}, arrays=False) == "['c'] does not belong there"


def test_below_a_leaf_of_the_expected_tree_anything_goes():
    below = {"a": {"kernel": {"x": 1, "y": None}, "bias": None}, "b": TREE["b"]}
    assert first_difference(TREE, below, is_leaf=lambda node: hasattr(node, "shape")) is None

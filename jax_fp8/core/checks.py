"""What must hold of a number, a flag or a tree that a user gives, in one sentence with what arrived.

Whoever knows what to do about it says so in `remedy`, which ends the sentence.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

INTEGERS, NUMBERS = int | np.integer, int | float | np.integer | np.floating


def check_integer(name: str, value: Any, least: int = 1, most: int | None = None) -> None:
    """Raise unless this is a Python or NumPy integer of at least `least`, and at most `most`."""
    is_number = isinstance(value, NUMBERS) and not isinstance(value, bool)
    fits = is_number and least <= value and (most is None or value <= most)
    if fits and isinstance(value, INTEGERS):
        return
    wanted = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
    remedy = f"; pass {int(value)}" if fits and math.isfinite(value) and value == int(value) else ""
    raise ValueError(f"{name} must be {wanted}, got {value!r}{remedy}")


def check_number(name: str, value: Any, wanted: str, holds: Callable[[float], bool], remedy: str = "") -> None:
    """Raise unless this is a finite number that has a property, as float32 too, which everything is computed in.

    Args:
      wanted: the property, after "must be a finite number".
      holds: whether a float has it.
    """
    if isinstance(value, NUMBERS) and not isinstance(value, bool):
        with np.errstate(over="ignore"):
            rounded = float(np.float32(value))
        if math.isfinite(rounded) and holds(rounded):
            return
    arrived = describe(value) if isinstance(value, jax.Array | np.ndarray) else repr(value)
    property_, what_to_do = f" {wanted}" if wanted else "", f"; {remedy}" if remedy else ""
    raise ValueError(f"{name} must be a finite number{property_}, got {arrived}{what_to_do}")


def check_bool(name: str, value: Any) -> None:
    """Raise unless this is True or False: every string is true."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def check_flags(**flags: Any) -> None:
    """`check_bool` of several, by their names."""
    for name, value in flags.items():
        check_bool(name, value)


def is_array(x: Any) -> bool:
    """Whether this is one array, traced or not."""
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def describe(x: Any) -> str:
    """A node of a tree in a few words: float32[4, 8], a dict with 'bias' and 'kernel', a FusedAdamState."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        kind = "" if is_array(x) or isinstance(x, jax.ShapeDtypeStruct) else f"a {type(x).__name__} "
        return f"{kind}{_name(x.dtype)}{list(x.shape)}"
    if isinstance(x, Mapping):
        names = [repr(name) for name in x]
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        return f"a {type(x).__name__} with {shown}" if names else f"an empty {type(x).__name__}"
    return "None" if x is None else f"a {type(x).__name__}"


def _name(dtype) -> str:
    """Also of random keys, whose dtype is none of NumPy's."""
    return getattr(dtype, "name", None) or np.dtype(dtype).name


def first_difference(
    expected: Any, arrived: Any, *, is_leaf: Callable[[Any], bool] | None = None, arrays: bool = True, path: tuple = ()
) -> str | None:
    """Where a tree is not as expected, first, and how, in words; None where it is.

    Args:
      is_leaf: what ends the expected tree; anything may stand in its place.
      arrays: whether arrays must have the shapes and dtypes of the expected ones.
      path: that leads to both, as jax writes it.
    """
    if is_leaf is not None and is_leaf(expected):
        return None
    if not path and is_leaf is None and _alike(expected, arrived, arrays):  # as a rule, and quickly known
        return None
    (wanted, wanted_leaf), (found, found_leaf) = _one_level(expected), _one_level(arrived)
    if wanted_leaf and found_leaf and not (arrays and describe(expected) != describe(arrived)):
        return None
    if wanted_leaf or found_leaf or type(expected) is not type(arrived):
        return f"{_place(path)} must be {describe(expected)}, got {describe(arrived)}"
    missing, extra = ([key for key in here if key not in there] for here, there in ((wanted, found), (found, wanted)))
    if missing:
        return f"{_place((*path, missing[0]))} is missing" + (f", {_place((*path, extra[0]))} is new" if extra else "")
    if extra:
        return f"{_place((*path, extra[0]))} does not belong there"
    below = (
        first_difference(child, found[key], is_leaf=is_leaf, arrays=arrays, path=(*path, key))
        for key, child in wanted.items()
    )
    return next(filter(None, below), None)


def flatten_like(name: str, tree: Any, arrived: Any, remedy: str) -> list:
    """What stands in the place of each leaf of params with the structure `tree`."""
    try:
        return tree.flatten_up_to(arrived)
    except ValueError:
        raise structure_error(name, tree, arrived, remedy) from None


class SingleArray:
    """Stands for a param where only the structure of a tree is known."""


def structure_error(name: str, tree: Any, arrived: Any, remedy: str) -> ValueError:
    """The error of one that has not the structure `tree` of the params, with the first difference."""
    expected = tree.unflatten([SingleArray()] * tree.num_leaves)
    difference = first_difference(expected, arrived, is_leaf=lambda node: isinstance(node, SingleArray))
    difference = difference or first_difference(expected, arrived, arrays=False)
    return ValueError(f"{name} must have the structure of params, but {difference}; {remedy}")


def _alike(expected, arrived, arrays) -> bool:
    if jax.tree.structure(expected) != jax.tree.structure(arrived):
        return False
    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(arrived), strict=True)
    return not arrays or all(describe(one) == describe(other) for one, other in pairs)


def _one_level(tree) -> tuple[dict, bool]:
    """The children of a node by their keys, and whether it has none because it is a leaf."""
    children = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: node is not tree)
    return {key[0]: child for key, child in children if key}, any(not key for key, _ in children)


def _place(path) -> str:
    return jax.tree_util.keystr(path) or "the tree"

"""Checks of the numbers, flags and trees that a user passes. An error is one sentence: what must hold, what arrived.

A caller that knows what to do about it passes a `remedy`, which ends the sentence.
"""

import math
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.tree_util import KeyPath

from jax_fp8.core.types import PyTree, TreeDef

ARRAYS = jax.Array | np.ndarray | np.generic
INTEGERS = int | np.integer
NUMBERS = int | float | np.integer | np.floating


def check_integer(name: str, value: object, least: int = 1, most: int | None = None) -> None:
    """Raise unless this is a Python or NumPy integer of at least `least`, and at most `most`."""
    remedy = ""
    if isinstance(value, NUMBERS) and not isinstance(value, bool):
        fits = least <= value and (most is None or value <= most)
        if fits and isinstance(value, INTEGERS):
            return
        if fits and math.isfinite(value) and value == int(value):
            remedy = f"; pass {int(value)}"
    wanted = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
    raise ValueError(f"{name} must be {wanted}, got {value!r}{remedy}")


def check_number(name: str, value: object, wanted: str, holds: Callable[[float], bool], remedy: str = "") -> None:
    """Raise unless this is a finite number that has a property, also when it is rounded to float32, for computing.

    Args:
      wanted: the property, in words that follow "must be a finite number".
      holds: whether a float has the property.
    """
    if isinstance(value, NUMBERS) and not isinstance(value, bool):
        with np.errstate(over="ignore"):
            rounded = float(np.float32(value))
        if math.isfinite(rounded) and holds(rounded):
            return
    arrived = describe(value) if isinstance(value, jax.Array | np.ndarray) else repr(value)
    property_, what_to_do = f" {wanted}" if wanted else "", f"; {remedy}" if remedy else ""
    raise ValueError(f"{name} must be a finite number{property_}, got {arrived}{what_to_do}")


def check_bool(name: str, value: object) -> None:
    """Raise unless this is True or False; Python would take any string for True."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def check_flags(**flags: object) -> None:
    """`check_bool` of several flags, each under its name."""
    for name, value in flags.items():
        check_bool(name, value)


def is_array(x: object) -> bool:
    """Whether this is one array, traced or not."""
    return isinstance(x, ARRAYS)


def describe(x: object) -> str:
    """A node of a tree in a few words: float32[4, 8], a dict with 'bias' and 'kernel', a FusedAdamState."""
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    if shape is not None and dtype is not None:
        kind = "" if is_array(x) or isinstance(x, jax.ShapeDtypeStruct) else f"a {type(x).__name__} "
        return f"{kind}{_dtype_name(dtype)}{list(shape)}"
    if isinstance(x, Mapping):
        names = [repr(name) for name in x]
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        return f"a {type(x).__name__} with {shown}" if names else f"an empty {type(x).__name__}"
    return "None" if x is None else f"a {type(x).__name__}"


def _dtype_name(dtype: jax.typing.DTypeLike) -> str:
    """The name of a dtype; also of random keys, whose dtype NumPy does not know."""
    return getattr(dtype, "name", None) or np.dtype(dtype).name


def first_difference(
    expected: PyTree,
    arrived: PyTree,
    *,
    is_leaf: Callable[[PyTree], bool] | None = None,
    arrays: bool = True,
    path: KeyPath = (),
) -> str | None:
    """The first difference of a tree from the expected one, in words; None where there is none.

    Args:
      is_leaf: whether a node ends the expected tree; anything may stand in its place.
      arrays: whether arrays must have the shapes and dtypes of the expected ones.
      path: the keys that lead to both trees.
    """
    if is_leaf is not None and is_leaf(expected):
        return None
    if not path and is_leaf is None and _are_equal(expected, arrived, arrays):  # the usual case, and a fast check
        return None
    (children, is_leaf_expected), (arrived_children, is_leaf_arrived) = _one_level(expected), _one_level(arrived)
    if is_leaf_expected and is_leaf_arrived and not (arrays and describe(expected) != describe(arrived)):
        return None
    if is_leaf_expected or is_leaf_arrived or type(expected) is not type(arrived):
        return f"{_shown(path)} must be {describe(expected)}, got {describe(arrived)}"
    missing = [key for key in children if key not in arrived_children]
    extra = [key for key in arrived_children if key not in children]
    if missing:
        return f"{_shown((*path, missing[0]))} is missing" + (f", {_shown((*path, extra[0]))} is new" if extra else "")
    if extra:
        return f"{_shown((*path, extra[0]))} does not belong there"
    below = (
        first_difference(child, arrived_children[key], is_leaf=is_leaf, arrays=arrays, path=(*path, key))
        for key, child in children.items()
    )
    return next(filter(None, below), None)


def flatten_like(name: str, tree: TreeDef, arrived: PyTree, remedy: str) -> list[PyTree]:
    """The nodes of `arrived` that stand in the place of leaves of params with the structure `tree`."""
    try:
        return tree.flatten_up_to(arrived)
    except ValueError:
        raise structure_error(name, tree, arrived, remedy) from None


class SingleArray:
    """Stands for a param where only the structure of a tree is known."""


def structure_error(name: str, tree: TreeDef, arrived: PyTree, remedy: str) -> ValueError:
    """The error for a tree that has not the structure `tree` of the params, with the first difference."""
    expected = tree.unflatten([SingleArray()] * tree.num_leaves)
    difference = first_difference(expected, arrived, is_leaf=lambda node: isinstance(node, SingleArray))
    difference = difference or first_difference(expected, arrived, arrays=False)
    return ValueError(f"{name} must have the structure of params, but {difference}; {remedy}")


def _are_equal(expected: PyTree, arrived: PyTree, arrays: bool) -> bool:
    if jax.tree.structure(expected) != jax.tree.structure(arrived):
        return False
    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(arrived), strict=True)
    return not arrays or all(describe(one) == describe(other) for one, other in pairs)


def _one_level(tree: PyTree) -> tuple[dict[object, PyTree], bool]:
    """The children of a node by their keys, and whether the node is a leaf, which has none."""
    children = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: node is not tree)
    return {key[0]: child for key, child in children if key}, any(not key for key, _ in children)


def _shown(path: KeyPath) -> str:
    return jax.tree_util.keystr(path) or "the tree"

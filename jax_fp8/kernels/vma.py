"""Inside a `jax.shard_map` that checks: over which mesh axes a value differs from device to device.

By default `shard_map` keeps these axes in the types. The result of a custom call has none there,
though it differs wherever an operand does; and what a `Ref` holds has to differ from the start where it is to hold
such values. Elsewhere, and where the check is off, nothing varies and all of this does nothing.
"""

from collections.abc import Iterable
from typing import Any

import jax
from jax import lax


def varying_axes(*trees: Any) -> frozenset[str]:
    """The axes over which any of these arrays varies."""
    return varying_in(jax.typeof(leaf) for leaf in jax.tree.leaves(trees) if isinstance(leaf, jax.Array))


def varying_in(types: Iterable[Any]) -> frozenset[str]:
    """The axes over which an array of any of these types varies, as `jax.typeof` returns them."""
    return frozenset().union(*(of.mat.varying if hasattr(of, "mat") else of.vma for of in types))


def vary(tree: Any, axes: frozenset[str]) -> Any:
    """The same arrays, which vary over these axes too."""

    def cast(leaf):
        missing = tuple(sorted(axes - varying_axes(leaf)))
        if not missing:
            return leaf
        if hasattr(lax, "pcast"):
            return lax.pcast(leaf, missing, to="varying")
        return getattr(lax, "pvary")(leaf, missing)  # noqa: B009 - its name in jax 0.10

    return jax.tree.map(cast, tree)


def match_vma(*trees: Any) -> tuple[Any, ...]:
    """These, all varying over the axes over which one of them does, as jax's own operations make their operands.

    The gradient of one that did not vary is then the sum over these axes.
    """
    return vary(trees, varying_axes(trees))

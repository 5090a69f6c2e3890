"""Inside a `jax.shard_map` that checks: over which mesh axes a value differs from device to device.

By default `shard_map` keeps these axes in the types. The result of a custom call has none there,
though it differs wherever an operand does; and what a `Ref` holds has to differ from the start where it is to hold
such values. Elsewhere, and where the check is off, nothing varies and all of this does nothing.
"""

from collections.abc import Iterable

import jax
from jax import lax

from jax_fp8.core.types import PyTree


def varying_axes(*trees: PyTree) -> frozenset[str]:
    """The axes over which any of these arrays varies."""
    return varying_in(jax.typeof(leaf) for leaf in jax.tree.leaves(trees) if isinstance(leaf, jax.Array))


def varying_in(types: Iterable[PyTree]) -> frozenset[str]:
    """The axes over which an array of any of these types varies, as `jax.typeof` returns them."""
    return frozenset().union(*(of.mat.varying if hasattr(of, "mat") else of.vma for of in types))


def vary(tree: PyTree, axes: frozenset[str]) -> PyTree:
    """The same arrays, typed as varying over these mesh axes too."""

    def cast(leaf: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - varying_axes(leaf)))
        if not missing:
            return leaf
        if hasattr(lax, "pcast"):
            return lax.pcast(leaf, missing, to="varying")
        return getattr(lax, "pvary")(leaf, missing)  # noqa: B009 - its name in jax 0.10

    return jax.tree.map(cast, tree)


def match_vma(*trees: PyTree) -> tuple[PyTree, ...]:
    """The same trees, all varying over the mesh axes over which any of them varies, as jax's own operations do.

    The gradient of a tree that did not vary is then a sum over these axes.
    """
    return vary(trees, varying_axes(trees))

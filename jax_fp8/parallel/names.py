"""Names of dims that params carry as Flax's metadata. A step on a mesh reads them as rules, and takes arrays without
them.

    model.init → boxes: an array and the names of its dims ─┬─rules_from_names→ rules by path
                                                            └─without_names→ arrays

Flax boxes an array whose initializer names its dims. With `nn.with_logical_partitioning` rules map the names to axes of
a mesh; with `nn.with_partitioning` the names are axes already.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax.core.meta import AxisMetadata
from flax.linen.spmd import logical_to_mesh_axes
from jax.sharding import PartitionSpec

from jax_fp8.core.paths import LayerPath, map_with_names
from jax_fp8.core.types import PyTree
from jax_fp8.parallel.mesh import FSDP

LogicalRules = Sequence[tuple[str, str | tuple[str, ...] | None]]


def rules_from_names(
    variables: PyTree, logical_rules: LogicalRules | None = None
) -> tuple[tuple[str, PartitionSpec], ...]:
    """Make the `rules` of a `Parallelism` from the names of the dims of params.

    A param without names gets no rule. Vectors stay whole over `fsdp`, as without rules.

    Args:
      variables: what `model.init` returns, or its shapes: `jax.eval_shape(model.init, ...)`.
      logical_rules: pairs of a name and an axis of the mesh, several axes or None, as `nn.logical_to_mesh_axes` takes
        them. Of several pairs with one name the first counts whose axes split no other dim of the param. None takes the
        rules of the surrounding `nn.logical_axis_rules`. A dim whose name is in no pair is not split.

    Returns:
      Pairs of a pattern that matches the path of one param, and its `PartitionSpec`.

    Raises:
      ValueError: if `variables` have no "params", or no param has names.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> layer = fp8.LayerNormMLP(32, logical_axes=True)
      >>> shapes = jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((2, 16)))
      >>> rules = fp8.rules_from_names(shapes, [("mlp", "tensor")])
      >>> tuple(dict(rules)["^up/kernel$"])
      (None, 'tensor')
    """
    rules: dict[str, PartitionSpec] = {}

    def read(path: LayerPath, leaf: object) -> None:
        if isinstance(leaf, nn.LogicallyPartitioned):
            spec = logical_to_mesh_axes(leaf.names, leaf.rules if logical_rules is None else logical_rules)
        elif isinstance(leaf, nn.Partitioned):
            spec = leaf.get_partition_spec()
        else:
            return
        rules["/".join(path)] = _rule(spec or (), leaf.value.ndim)

    if not isinstance(variables, Mapping) or "params" not in variables:
        raise ValueError(
            f'rules_from_names needs variables with "params", got {type(variables).__name__}; pass what '
            "jax.eval_shape(model.init, ...) returned"
        )
    map_with_names(read, variables["params"], is_leaf=_is_box)
    if not rules:
        raise ValueError(
            "rules_from_names needs params whose initializers name their dims, got none; make layers with "
            "logical_axes=True, or initializers by nn.with_logical_partitioning, and do not unbox what they return"
        )
    return tuple((f"^{re.escape(path)}$", spec) for path, spec in rules.items())


def without_names(tree: PyTree) -> PyTree:
    """The arrays without their boxes. Unlike `nn.unbox`, it adds no sharding constraint where a mesh is set."""

    def unbox(leaf: Any) -> Any:
        if isinstance(leaf, nn.Partitioned):
            return leaf.unbox(apply_constraint=False)
        return leaf.unbox() if _is_box(leaf) else leaf

    return jax.tree.map(unbox, tree, is_leaf=_is_box)


def _rule(spec: Iterable[str | tuple[str, ...] | None], ndim: int) -> PartitionSpec:
    """A spec of all dims, from a spec of the first ones; without `fsdp` for a vector."""

    def axes(entry: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        names = entry if isinstance(entry, tuple) else (entry,)
        own = tuple(name for name in names if name is not None and (name != FSDP or ndim > 1))
        return own if len(own) > 1 else next(iter(own), None)

    entries = [*map(axes, spec)]
    return PartitionSpec(*entries, *[None] * (ndim - len(entries)))


def _is_box(node: object) -> bool:
    return isinstance(node, AxisMetadata)

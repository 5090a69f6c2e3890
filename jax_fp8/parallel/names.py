"""Names of dims that params carry as Flax's metadata: read as rules of a step on a mesh, and taken off for it.

    model.init ─boxes: an array and the names of its dims─ rules_from_names → rules by path; without_names → arrays

Flax puts an array into a box where an initializer names its dims: `nn.with_logical_partitioning`, whose names are
mapped to axes of a mesh by rules, and `nn.with_partitioning`, whose names are such axes.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax.core.meta import AxisMetadata
from flax.linen.spmd import logical_to_mesh_axes
from jax.sharding import PartitionSpec

from jax_fp8.core.paths import map_with_names
from jax_fp8.parallel.mesh import FSDP

LogicalRules = Sequence[tuple[str, Any]]


def rules_from_names(
    variables: Any, logical_rules: LogicalRules | None = None
) -> tuple[tuple[str, PartitionSpec], ...]:
    """The `rules` of `make_train_step` that the names of dims of params say; params without names have none. Vectors
    are left whole over `fsdp`, as they are without rules.

    Args:
      variables: what `model.init` returns, or its shapes: `jax.eval_shape(model.init, ...)`.
      logical_rules: pairs of a name and an axis of the mesh, some axes or None, as `nn.logical_to_mesh_axes` takes
        them: of several for one name the first counts whose axes split no other dim of the param. None takes those of
        the `nn.logical_axis_rules` around. What they do not name is not split.
    """
    found: dict[str, PartitionSpec] = {}

    def read(path, leaf):
        if isinstance(leaf, nn.LogicallyPartitioned):
            spec = logical_to_mesh_axes(leaf.names, leaf.rules if logical_rules is None else logical_rules)
        elif isinstance(leaf, nn.Partitioned):
            spec = leaf.get_partition_spec()
        else:
            return
        found["/".join(path)] = _rule(spec or (), leaf.value.ndim)

    if not isinstance(variables, Mapping) or "params" not in variables:
        raise ValueError(
            f'rules_from_names needs variables with "params", got {type(variables).__name__}; pass what '
            "jax.eval_shape(model.init, ...) returned"
        )
    map_with_names(read, variables["params"], is_leaf=_is_box)
    if not found:
        raise ValueError(
            "rules_from_names needs params whose initializers name their dims, got none; make layers with "
            "logical_axes=True, or initializers by nn.with_logical_partitioning, and do not unbox what they return"
        )
    return tuple((f"^{re.escape(path)}$", spec) for path, spec in found.items())


def without_names(tree: Any) -> Any:
    """The arrays alone. No sharding is asked for on the way, as `nn.unbox` does where a mesh is set."""

    def take_out(leaf):
        if isinstance(leaf, nn.Partitioned):
            return leaf.unbox(apply_constraint=False)
        return leaf.unbox() if _is_box(leaf) else leaf

    return jax.tree.map(take_out, tree, is_leaf=_is_box)


def _rule(spec, ndim) -> PartitionSpec:
    """The spec of all dims, from one of the first."""

    def axes(entry):
        names = entry if isinstance(entry, tuple) else (entry,)
        kept = tuple(name for name in names if name is not None and (name != FSDP or ndim > 1))
        return kept if len(kept) > 1 else next(iter(kept), None)

    return PartitionSpec(*map(axes, spec), *[None] * (ndim - len(spec)))


def _is_box(node: Any) -> bool:
    return isinstance(node, AxisMetadata)

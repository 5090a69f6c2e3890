"""Arrays on Explicit meshes: which mesh axes split which dim, told by an einsum-like rule, and products that follow it.

`jax.make_mesh` makes such meshes by default. Operands carry their shardings in their types, and jax asks for that of
a result wherever two operands disagree. Here one rule answers for every operation: the first operand that splits a dim
decides for all, and no two dims of one array are split by the same axis. What is split otherwise is gathered:
under data parallelism nothing, with params split over the axis of the batch (fsdp) the param. The dim "m/128" is that
of tiles along m, one for every 128 elements: what splits m splits it too.

On other meshes, and on none, all of this does nothing.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Split = dict[str, tuple[str, ...]]
Dims = Sequence[Sequence[str]]
OR_NAN: Any = {"mode": "fill", "fill_value": np.nan, "wrap_negative_indices": False}  # of an index that is not there


def parse_rule(rule: str) -> tuple[list[list[str]], list[list[str]]]:
    """Dims of every operand and of every result: "m k, -> m" is ([["m", "k"], []], [["m"]])."""
    operands, results = rule.split("->")
    return [dims.split() for dims in operands.split(",")], [dims.split() for dims in results.split(",")]


def collect(inputs: Dims, outputs: Dims, specs: Sequence[Any]) -> Split:
    """The axes of every dim: the first operand that splits it decides for all; no two dims of one array are split by
    the same axis.
    """
    arrays, split = [*inputs, *outputs], {}
    for dims, spec in zip(inputs, specs, strict=True):
        for dim, axes in zip(map(elements, dims), spec, strict=False):
            axes = axes if isinstance(axes, tuple) else (axes,) if isinstance(axes, str) else ()
            if axes and dim not in split and not set(axes) & _axes_beside(dim, arrays, split):
                split[dim] = axes
    return split


def spec_of(dims: Sequence[str], split: Split) -> PartitionSpec:
    """How an array of these dims is split."""
    return PartitionSpec(*(split.get(elements(dim)) or None for dim in dims))


def elements(dim: str) -> str:
    """The dim that another one counts the tiles of; any other dim is itself."""
    return dim.partition("/")[0]


def check_tiles(mesh: Any, inputs: Dims, split: Split, shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise where a dim is split within one of the tiles that an operand has along it."""
    sizes = {
        dim: size for dims, shape in zip(inputs, shapes, strict=True) for dim, size in zip(dims, shape, strict=True)
    }
    for dim in sizes:
        name, _, length = dim.partition("/")
        shards = _size(mesh, split.get(name))
        if length and shards > 1 and sizes[name] % (shards * int(length)):
            raise ValueError(
                f"each device must hold whole tiles of {length} elements of a matrix with scales by tile, "
                f"got {sizes[name]} over {shards} devices of {split[name]}; "
                "use other sizes, another mesh, or a recipe with one scale a tensor"
            )


def explicit_mesh(*arrays: Any) -> Any:
    """The mesh of the first array that lies on one with Explicit axes, as jax's types have it; or None."""
    for array in arrays:
        mesh = jax.typeof(array).sharding.mesh
        if not mesh.empty and AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def explicit_spec(array: Any) -> tuple[Any, ...]:
    """The Explicit axes of every dim of an array; nothing elsewhere."""
    return tuple(getattr(jax.typeof(array).sharding, "spec", ()))


def divides(mesh: Any, axes: Any, size: int) -> bool:
    """Whether these axes of a mesh, a name, some or None, split so many elements evenly."""
    return size % _size(mesh, axes) == 0


def _size(mesh, axes) -> int:
    names = axes if isinstance(axes, tuple) else (axes,) if axes else ()
    return math.prod(mesh.shape[name] for name in names)


def shards_of(array: Any, dim: int) -> int:
    """How many parts an Explicit mesh makes of a dim."""
    mesh, spec = explicit_mesh(array), explicit_spec(array)
    return 1 if mesh is None or len(spec) <= dim else _size(mesh, spec[dim])


def place(mesh: Any, array: jax.Array, spec: PartitionSpec) -> jax.Array:
    """An array on an Explicit mesh, split as `spec` says."""
    return jax.reshard(array, NamedSharding(mesh, spec))


def inside_mesh_of(*trees: Any) -> AbstractContextManager:
    """The context in which new arrays lie on the Explicit mesh of these; where a mesh was set already, that one's."""
    if jax.sharding.get_abstract_mesh().empty:
        for leaf in jax.tree.leaves(trees):
            mesh = explicit_mesh(leaf) if isinstance(leaf, jax.Array) else None
            if mesh is not None and isinstance(leaf, Tracer):
                return jax.sharding.use_abstract_mesh(mesh)
            if mesh is not None:
                sharding: Any = leaf.sharding
                return jax.set_mesh(sharding.mesh)
    return nullcontext()


def inside_its_mesh(function: Callable) -> Callable:
    """The function in the context of `inside_mesh_of` its arguments."""

    @wraps(function)
    def run(*args, **kwargs):
        with inside_mesh_of(args):
            return function(*args, **kwargs)

    return run


def zeros_like(x: jax.Array, dtype: Any = None) -> jax.Array:
    """Zeros that lie as `x` does."""
    zeros, mesh = jnp.zeros_like(x, dtype), explicit_mesh(x)
    return zeros if mesh is None or explicit_mesh(zeros) else place(mesh, zeros, PartitionSpec(*explicit_spec(x)))


def whole(array: jax.Array) -> jax.Array:
    """All of an array on every device of its Explicit mesh."""
    mesh = explicit_mesh(array)
    return array if mesh is None else place(mesh, array, PartitionSpec(*[None] * array.ndim))


def whole_rows(array: jax.Array) -> jax.Array:
    """An array whose last dim is on every device of its Explicit mesh; the others stay as they are split."""
    mesh = explicit_mesh(array)
    return array if mesh is None else place(mesh, array, PartitionSpec(*explicit_spec(array)[:-1], None))


def einsum(rule: str, *operands: jax.Array) -> jax.Array:
    """`jnp.einsum` of a rule with one result, dims apart: "b s h, v h -> b s v"."""
    letters = rule.replace(" ", "")
    mesh = explicit_mesh(*operands)
    if mesh is None:
        return jnp.einsum(letters, *operands)
    inputs, outputs = parse_rule(rule)
    split = collect(inputs, outputs, [explicit_spec(operand) for operand in operands])
    placed = (place(mesh, operand, spec_of(dims, split)) for dims, operand in zip(inputs, operands, strict=True))
    return jnp.einsum(letters, *placed, out_sharding=NamedSharding(mesh, spec_of(outputs[0], split)))


def whole_first(array: jax.Array, dim: int) -> jax.Array:
    """The first slice along a dim, -1 or -2, all of it on every device of an Explicit mesh."""
    mesh, after = explicit_mesh(array), (slice(None),) * (-1 - dim)
    if mesh is None:
        return array[(..., 0, *after)]
    # An index that is an array makes a gather, which may cross shards; a slice may not.
    return array.at[(..., np.array([0]), *after)].get(out_sharding=NamedSharding(mesh, PartitionSpec()))


def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`x @ kernel` for `x` (..., k) and a kernel (k, n)."""
    if explicit_mesh(x, kernel) is None:
        return x @ kernel
    leading = " ".join(f"{chr(ord('A') + dim)}" for dim in range(x.ndim - 1))
    return einsum(f"{leading} k, k n -> {leading} n", x, kernel)


def like_columns(row: jax.Array, x: jax.Array) -> jax.Array:
    """A row (n,) to be added to every one of `x` (..., n): split as its columns are."""
    mesh = explicit_mesh(x, row)
    return row if mesh is None else place(mesh, row, PartitionSpec((*[None] * x.ndim, *explicit_spec(x))[-1]))


def lookup(table: jax.Array, indices: jax.Array) -> jax.Array:
    """`table[indices]` for a table (v, h) and integers (...), NaN for one that is not from 0 to v - 1: split as the
    integers are, and the last dim as the table's where that is another axis.
    """
    mesh = explicit_mesh(indices, table)
    if mesh is None:
        return jnp.asarray(table).at[indices].get(**OR_NAN)
    dims = [f"i{dim}" for dim in range(indices.ndim)]
    split = collect([dims, ["v", "h"]], [[*dims, "h"]], [explicit_spec(indices), explicit_spec(table)])
    used = {axis for dim in [*dims, "h"] for axis in split.get(dim, ())}
    if used & set(split.get("v", ())):
        split.pop("v")
    table, indices = place(mesh, table, spec_of(["v", "h"], split)), place(mesh, indices, spec_of(dims, split))
    return table.at[indices].get(**OR_NAN, out_sharding=NamedSharding(mesh, spec_of([*dims, "h"], split)))


def _axes_beside(dim, arrays, split) -> set[str]:
    """Axes that already split another dim of an array that has this one."""
    named = (list(map(elements, dims)) for dims in arrays)
    return {axis for dims in named if dim in dims for other in dims for axis in split.get(other, ())}

"""Arrays on Explicit meshes: which mesh axes split which dim, by an einsum-like rule, and products that follow it.

`jax.make_mesh` makes such meshes by default. Arrays carry their shardings in their types, and where two operands
disagree, jax asks for the sharding of the result. One rule answers for every operation here: the first operand that
splits a dim decides for all, and one axis never splits two dims of one array. An operand that is split otherwise is
gathered: with data parallelism none, with params split over the axis of the batch (fsdp) the param. The dim "m/128"
counts tiles of 128 elements along m; the axes that split m split it too.

On other meshes, and without a mesh, these functions change nothing.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_fp8.core.types import PyTree

Split = dict[str, tuple[str, ...]]
Dims = Sequence[Sequence[str]]
AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
Axes = str | tuple[str, ...] | None  # the mesh axes that split one dim


def parse_rule(rule: str) -> tuple[list[list[str]], list[list[str]]]:
    """Dims of every operand and of every result: "m k, -> m" is ([["m", "k"], []], [["m"]])."""
    operands, results = rule.split("->")
    return [dims.split() for dims in operands.split(",")], [dims.split() for dims in results.split(",")]


def collect(inputs: Dims, outputs: Dims, specs: Sequence[Sequence[Axes]]) -> Split:
    """The mesh axes of every dim. The first operand that splits a dim decides for all; one axis never splits two dims
    of one array.
    """
    arrays, split = [*inputs, *outputs], dict[str, tuple[str, ...]]()
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
    """ "m" for "m/128", the dim whose tiles it counts; any other dim itself."""
    return dim.partition("/")[0]


def check_tiles(mesh: AnyMesh, inputs: Dims, split: Split, shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise where a mesh would split a dim within a tile of an operand."""
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


def explicit_mesh(*arrays: object) -> AnyMesh | None:
    """The mesh with Explicit axes of the first array that is on one, from its type; or None."""
    for array in arrays:
        mesh = jax.typeof(array).sharding.mesh
        if not mesh.empty and AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def explicit_spec(array: object) -> tuple[Axes, ...]:
    """The Explicit axes of every dim of an array; nothing elsewhere."""
    return tuple(getattr(jax.typeof(array).sharding, "spec", ()))


def divides(mesh: AnyMesh, axes: Axes, size: int) -> bool:
    """Whether these axes of a mesh split `size` elements evenly."""
    return size % _size(mesh, axes) == 0


def _size(mesh: AnyMesh, axes: Axes) -> int:
    names = axes if isinstance(axes, tuple) else (axes,) if axes else ()
    return math.prod(mesh.shape[name] for name in names)


def shards_of(array: object, dim: int) -> int:
    """How many parts an Explicit mesh makes of a dim."""
    mesh, spec = explicit_mesh(array), explicit_spec(array)
    return 1 if mesh is None or len(spec) <= dim else _size(mesh, spec[dim])


def place(mesh: AnyMesh, array: jax.Array, spec: PartitionSpec) -> jax.Array:
    """An array on an Explicit mesh, split as `spec` says."""
    return jax.reshard(array, NamedSharding(mesh, spec))


def inside_mesh_of(*trees: PyTree) -> AbstractContextManager:
    """A context in which new arrays are on the Explicit mesh of these trees, unless a mesh is set already."""
    if jax.sharding.get_abstract_mesh().empty:
        for leaf in jax.tree.leaves(trees):
            mesh = explicit_mesh(leaf) if isinstance(leaf, jax.Array) else None
            if mesh is not None and isinstance(leaf, Tracer):
                return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
            if mesh is not None:
                return jax.set_mesh(leaf.sharding.mesh)  # type: ignore[attr-defined]
    return nullcontext()


def inside_its_mesh(function: Callable) -> Callable:
    """The function in the context of `inside_mesh_of` its arguments."""

    @wraps(function)
    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        with inside_mesh_of(args):
            return function(*args, **kwargs)

    return run


def zeros_like(x: jax.Array, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """Zeros like `x`, with its sharding."""
    zeros, mesh = jnp.zeros_like(x, dtype), explicit_mesh(x)
    return zeros if mesh is None or explicit_mesh(zeros) else place(mesh, zeros, PartitionSpec(*explicit_spec(x)))


def whole(array: jax.Array) -> jax.Array:
    """The whole array on every device of its Explicit mesh."""
    mesh = explicit_mesh(array)
    return array if mesh is None else place(mesh, array, PartitionSpec(*[None] * array.ndim))


def whole_rows(array: jax.Array) -> jax.Array:
    """The array with its last dim whole on every device of its Explicit mesh; other dims stay split."""
    return whole_along(array, -1)


def whole_along(array: jax.Array, dim: int) -> jax.Array:
    """The array with this dim whole on every device of its Explicit mesh; other dims stay split."""
    mesh, spec = explicit_mesh(array), [*explicit_spec(array)]
    if mesh is None:
        return array
    spec[dim] = None
    return place(mesh, array, PartitionSpec(*spec))


def einsum(rule: str, *operands: jax.Array, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """`jnp.einsum` by a rule with spaces between dims and one result: "b s h, v h -> b s v". Sums and result are in
    `dtype`; None: that of the operands.
    """
    letters = rule.replace(" ", "")
    mesh = explicit_mesh(*operands)
    if mesh is None:
        return jnp.einsum(letters, *operands, preferred_element_type=dtype)
    inputs, outputs = parse_rule(rule)
    split = collect(inputs, outputs, [explicit_spec(operand) for operand in operands])
    placed = (place(mesh, operand, spec_of(dims, split)) for dims, operand in zip(inputs, operands, strict=True))
    placement = NamedSharding(mesh, spec_of(outputs[0], split))
    return jnp.einsum(letters, *placed, out_sharding=placement, preferred_element_type=dtype)


def whole_first(array: jax.Array, dim: int) -> jax.Array:
    """The first slice along a dim, -1 or -2, whole on every device of an Explicit mesh."""
    mesh, after = explicit_mesh(array), (slice(None),) * (-1 - dim)
    if mesh is None:
        return array[(..., 0, *after)]
    # An array as index makes a gather, which may cross shards; a slice may not.
    return array.at[(..., np.array([0]), *after)].get(out_sharding=NamedSharding(mesh, PartitionSpec()))


def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`x @ kernel` for `x` (..., k) and a kernel (k, n)."""
    if explicit_mesh(x, kernel) is None:
        return x @ kernel
    leading = " ".join(f"{chr(ord('A') + dim)}" for dim in range(x.ndim - 1))
    return einsum(f"{leading} k, k n -> {leading} n", x, kernel)


def like_columns(row: jax.Array, x: jax.Array) -> jax.Array:
    """A row (n,) to add to every row of `x` (..., n), split as the columns of `x` are."""
    mesh = explicit_mesh(x, row)
    return row if mesh is None else place(mesh, row, PartitionSpec((*[None] * x.ndim, *explicit_spec(x))[-1]))


def lookup(table: jax.Array, indices: jax.Array) -> jax.Array:
    """`table[indices]` for a table (v, h) and integers (...); NaN for an index outside of [0, v). The result is split
    like the indices, and its last dim like that of the table where another axis splits it.
    """
    mesh = explicit_mesh(indices, table)
    if mesh is None:
        return jnp.asarray(table).at[indices].get(mode="fill", fill_value=np.nan, wrap_negative_indices=False)
    dims = [f"i{dim}" for dim in range(indices.ndim)]
    split = collect([dims, ["v", "h"]], [[*dims, "h"]], [explicit_spec(indices), explicit_spec(table)])
    used = {axis for dim in [*dims, "h"] for axis in split.get(dim, ())}
    if used & set(split.get("v", ())):
        split.pop("v")
    table, indices = place(mesh, table, spec_of(["v", "h"], split)), place(mesh, indices, spec_of(dims, split))
    return table.at[indices].get(
        mode="fill",
        fill_value=np.nan,
        wrap_negative_indices=False,
        out_sharding=NamedSharding(mesh, spec_of([*dims, "h"], split)),
    )


def _axes_beside(dim: str, arrays: Dims, split: Split) -> set[str]:
    """Axes that already split another dim of an array that has this one."""
    named = (list(map(elements, dims)) for dims in arrays)
    return {axis for dims in named if dim in dims for other in dims for axis in split.get(other, ())}

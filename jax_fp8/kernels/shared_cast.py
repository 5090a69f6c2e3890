"""One FP8 copy of several leaves of an optimizer: kernels (k, n_i) that one GEMM multiplies by, side by side as one
matrix (k, n).

Every leaf writes its own columns of the copy, rows of the transpose, with one scale for all, and raises one amax. On
shards of the columns the leaves of a device are not beside each other in the whole: there the device writes a copy of
its own, and the pieces are gathered.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_fp8.core.fp8_array import Fp8Pair
from jax_fp8.kernels.amax import amax_reference
from jax_fp8.kernels.casting import quantize_reference
from jax_fp8.kernels.dispatch import Split, gathered

SHARED_ARRAYS = ("values", "values_t", "scale", "amax")  # the kernel's order
STEP = 16  # columns of a leaf are a multiple of it, for stores of 16 bytes

Arrays = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
Members = tuple[int, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SharedCast:
    """A copy to be written anew.

    Args:
      pair: (k, n) in both orientations, with one scale.
      scale: float32 scalar to write it with, which becomes its scale.
      leaves: the numbers of the leaves whose kernels stand side by side, from left to right; static.
    """

    pair: Fp8Pair
    scale: jax.Array
    leaves: Members = field(metadata={"static": True})


class Place(NamedTuple):
    """Where the values of a leaf are: in which shared cast, -1 for none, and from which column on."""

    cast: int = -1
    first_column: int = 0


def places(shared: Sequence[Members], shapes: Sequence[tuple[int, ...]]) -> list[Place]:
    """The place of every leaf, from the shapes of all."""
    found = [Place()] * len(shapes)
    for cast, members in enumerate(shared):
        widths = [shapes[number][1] for number in members]
        for number, first in zip(members, accumulate(widths, initial=0), strict=False):
            found[number] = Place(cast, first)
    return found


def check_shared_casts(shared: Sequence[SharedCast], leaves: Sequence[Any]) -> None:
    """Raise where the copies are not those of their leaves."""
    numbers = [number for cast in shared for number in cast.leaves]
    if len(set(numbers)) < len(numbers) or not all(cast.leaves for cast in shared):
        raise ValueError(
            f"shared casts must have leaves, each leaf a place in one cast, got {[cast.leaves for cast in shared]}; "
            "name every leaf once"
        )
    for cast in shared:
        members = [leaves[number] for number in cast.leaves]
        if any(leaf.param is None or leaf.cast is not None for leaf in members):
            raise ValueError(
                f"the leaves {cast.leaves} of a shared cast must have a param and no cast of their own; "
                "leave either cast out"
            )
        shapes = [leaf.gradient.shape for leaf in members]
        rows, columns = {shape[0] for shape in shapes if len(shape) == 2}, [shape[-1] for shape in shapes if shape]
        whole = cast.pair.rowwise.shape
        if any(len(shape) != 2 or shape[0] % STEP or shape[1] % STEP for shape in shapes) or len(rows) > 1:
            raise ValueError(
                f"kernels side by side must be matrices with as many rows, all sizes divisible by {STEP}, "
                f"got shapes {shapes}; "
                "cast others after the step"
            )
        if whole != (*rows, sum(columns)) or cast.pair.columnwise is None:
            orientations = "one orientation" if cast.pair.columnwise is None else "both orientations"
            raise ValueError(
                f"the shared cast of kernels of shapes {shapes} must have shape {(*rows, sum(columns))} "
                "and both orientations, got "
                f"{whole} in {orientations}; make it with quantize_transpose of these kernels, in this order"
            )


def shared_cast_reference(weights: Sequence[jax.Array], old: Arrays, scale: jax.Array, unchanged: jax.Array) -> Arrays:
    """The arrays of a shared cast of these weights, or as they were."""
    weight = jnp.concatenate([weight.astype(jnp.float32) for weight in weights], axis=1)
    values = quantize_reference(weight, old[0].dtype, scale)
    new = values, values.T, scale, amax_reference(weight)
    return tuple(jnp.where(unchanged, *pair) for pair in zip(old, new, strict=True))  # type: ignore[return-value]


# ---- shards ----------------------------------------------------------------------------------------------------------


def row_dim(cast: int) -> str:
    """The rows of a shared cast and of its leaves, which devices may split."""
    return f"c{cast}k"


def column_dim(leaf: int) -> str:
    return f"x{leaf}d1"


def shared_dims(count: int, side: str) -> list[str]:
    """The dims of all arrays of shared casts, for a rule. The columns of operands and of results have two names:
    they come out whole."""
    dims = ((row_dim(cast), f"c{cast}{side}") for cast in range(count))
    return [text for rows, columns in dims for text in (f"{rows} {columns}", f"{columns} {rows}", "", "")]


def is_split(members: Members, split: Split) -> bool:
    return any(split.get(column_dim(number)) for number in members)


def on_this_shard(cast: int, members: Members, old: Arrays, width: int, split: Split) -> tuple[Arrays, Arrays]:
    """The copy as it was, with all columns; and what to write on: the same,
    or on shards of columns room for the columns that are here."""
    values, values_t, scale, amax = old
    name = f"c{cast}in"
    whole = gathered(values, split, "", name), gathered(values_t, split, name, ""), scale, amax
    if not is_split(members, split):
        return whole, whole
    rows = values.shape[0]
    return whole, (jnp.zeros((rows, width), values.dtype), jnp.zeros((width, rows), values.dtype), scale, amax)


def with_all_columns(members: Members, widths: Sequence[int], written: Arrays, old: Arrays, split: Split, unchanged):
    """A copy that was written on this shard, with the columns of all shards; or as it was."""
    if not is_split(members, split):
        return written
    ends = list(accumulate(widths))[:-1]

    def whole(array, dim):
        pieces, leading = jnp.split(array, ends, axis=dim), [""] * dim
        gathered_pieces = [
            gathered(piece, split, *leading, column_dim(n)) for piece, n in zip(pieces, members, strict=True)
        ]
        return jnp.where(unchanged, old[1 - dim], jnp.concatenate(gathered_pieces, axis=dim))

    values, values_t, scale, amax = written
    return whole(values, 1), whole(values_t, 0), scale, amax

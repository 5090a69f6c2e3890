"""One FP8 copy of several leaves of an optimizer: kernels (k, n_i) that one GEMM multiplies by, side by side as one
matrix (k, n).

Every leaf writes its own columns of the copy and rows of the transpose, with one scale for all, and raises one amax. On
shards of the columns, the leaves of a device are not adjacent in the whole matrix. There each device writes a copy of
its own columns, and the pieces are gathered.

By tile, each square of 128 x 128 has a scale that follows from its own new params, so no square may have columns of two
leaves. A copy by tile may also be of a single leaf.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_fp8.core.cast import SQUARE, Cast, CastRule
from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair, tiles_of
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.amax import amax_reference
from jax_fp8.kernels.casting import cast_reference, check_whole_tiles, has_kernel, quantize_reference, tile_dims
from jax_fp8.kernels.dispatch import Split, gathered

SHARED_ARRAYS = ("values", "values_t", "scale", "amax")  # the kernel's order
TILED_ARRAYS = (*SHARED_ARRAYS, "scale_t")
STEP = 16  # columns of a leaf are a multiple of it, for stores of 16 bytes

Arrays = tuple[jax.Array, ...]  # of SHARED_ARRAYS, or by tile of TILED_ARRAYS
Members = tuple[int, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SharedCast:
    """A copy to be written anew.

    Args:
      pair: (k, n) in both orientations, with one scale, or one for each square.
      scale: float32 scalar to write it with, which becomes its scale; None by tile.
      leaves: the numbers of the leaves whose kernels stand side by side, from left to right; static.
      rule: by tile, how a square is cast, the same in all casts of a call; None with one scale; static.
    """

    pair: Fp8Pair
    scale: jax.Array | None
    leaves: Members = field(metadata={"static": True})
    rule: CastRule | None = field(default=None, metadata={"static": True})

    @property
    def arrays(self) -> Arrays:
        """The pair in the kernel's order."""
        return self.pair.arrays if self.rule is None else (*self.pair.arrays, self.pair.columnwise.scale)

    def pair_of(self, arrays: Iterator[jax.Array]) -> Fp8Pair:
        """The pair of the next of these arrays."""
        values, values_t, scale, amax = (next(arrays) for _ in SHARED_ARRAYS)
        if self.rule is None:
            return Fp8Pair.with_shared_scale(values, values_t, scale, amax)
        rowwise = Fp8Array(values, scale, self.rule.tile)
        return Fp8Pair(rowwise, Fp8Array(values_t, next(arrays), self.rule.columnwise_tile), amax)


def arrays_by(rule: CastRule | None) -> tuple[str, ...]:
    """The names of the arrays of a copy."""
    return SHARED_ARRAYS if rule is None else TILED_ARRAYS


def can_be_written(rule: CastRule, widths: Sequence[int]) -> bool:
    """Whether leaves of these widths, side by side, can write a copy by this rule on their way: with a scale that is
    known before, or in squares that none of them shares with another.
    """
    if rule.tile is None:
        return rule.formula is None
    are_squares = rule.tile == rule.columnwise_tile == SQUARE and has_kernel(rule)
    return are_squares and not any(first % SQUARE[1] for first in accumulate(widths[:-1]))


class ColumnPlace(NamedTuple):
    """Where the values of a leaf are: in which shared cast, -1 for none, and from which column on."""

    cast: int = -1
    first_column: int = 0


def places(shared: Sequence[Members], shapes: Sequence[tuple[int, ...]]) -> list[ColumnPlace]:
    """The place of every leaf, from the shapes of all."""
    found = [ColumnPlace()] * len(shapes)
    for cast, members in enumerate(shared):
        widths = [shapes[number][1] for number in members]
        for number, first in zip(members, accumulate(widths, initial=0), strict=False):
            found[number] = ColumnPlace(cast, first)
    return found


def check_shared_casts(shared: Sequence[SharedCast], leaves: Sequence[PyTree]) -> None:
    """Raise where the copies are not those of their leaves."""
    numbers = [number for cast in shared for number in cast.leaves]
    if len(set(numbers)) < len(numbers) or not all(cast.leaves for cast in shared):
        raise ValueError(
            f"shared casts must have leaves, each leaf a place in one cast, got {[cast.leaves for cast in shared]}; "
            "name every leaf once"
        )
    if len({cast.rule for cast in shared}) > 1:
        raise ValueError(
            f"shared casts of one step must be alike, got the rules {[cast.rule for cast in shared]}; "
            "cast others after the step"
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
        if cast.rule is not None and not can_be_written(cast.rule, columns):
            raise ValueError(
                "kernels must be cast in squares of 128 x 128 by a `ScaleFormula`, and begin at whole ones where they "
                f"stand side by side, got shapes {shapes} and {cast.rule}; cast others after the step"
            )
        if whole != (*rows, sum(columns)) or cast.pair.columnwise is None:
            orientations = "one orientation" if cast.pair.columnwise is None else "both orientations"
            raise ValueError(
                f"the shared cast of kernels of shapes {shapes} must have shape {(*rows, sum(columns))} "
                "and both orientations, got "
                f"{whole} in {orientations}; make it with quantize_transpose of these kernels, in this order"
            )


def shared_cast_reference(
    weights: Sequence[jax.Array], old: Arrays, scale: jax.Array, rule: CastRule | None, unchanged: jax.Array
) -> Arrays:
    """The arrays of a shared cast of these weights, or as they were."""
    weight = jnp.concatenate([weight.astype(jnp.float32) for weight in weights], axis=1)
    if rule is None:
        values = quantize_reference(weight, old[0].dtype, scale)
        new = values, values.T, scale, amax_reference(weight)
    else:
        rowwise = cast_reference(weight, Cast(scale, rule))
        columnwise = cast_reference(weight.T, Cast(scale, replace(rule, tile=rule.columnwise_tile)))
        new = rowwise.values, columnwise.values, rowwise.scale, amax_reference(weight), columnwise.scale
    return tuple(jnp.where(unchanged, *pair) for pair in zip(old, new, strict=True))


# ---- shards ----------------------------------------------------------------------------------------------------------


def row_dim(cast: int) -> str:
    """The rows of a shared cast and of its leaves, which devices may split."""
    return f"c{cast}k"


def column_dim(leaf: int) -> str:
    return f"x{leaf}d1"


def shared_dims(shared: Sequence[Members], side: str, rule: CastRule | None) -> list[str]:
    """The dims of all arrays of shared casts, for a rule. The columns of operands and of results have two names where
    they are of several leaves: they come out whole.
    """
    found = []
    for cast, members in enumerate(shared):
        columns = column_dim(*members) if len(members) == 1 else f"c{cast}{side}"
        for name in arrays_by(rule):
            matrix = f"{columns} {row_dim(cast)}" if _is_transposed(name) else f"{row_dim(cast)} {columns}"
            scales = "" if rule is None else tile_dims(matrix, SQUARE)
            found.append({"values": matrix, "scale": scales}.get(name.removesuffix("_t"), ""))
    return found


def is_split(members: Members, split: Split) -> bool:
    """Whether the columns of several leaves on a device are not beside each other in the whole."""
    return len(members) > 1 and any(split.get(column_dim(number)) for number in members)


def check_shards(
    shared: Sequence[Members], shapes: Sequence[tuple[int, ...]], split: Split, rule: CastRule | None
) -> None:
    """Raise where a mesh cuts the squares of a copy by tile; the shapes are those of all leaves here."""
    for cast, members in enumerate(shared if rule is not None else ()):
        for number in members:
            check_whole_tiles(split, (row_dim(cast), column_dim(number)), shapes[number], SQUARE)


def on_this_shard(
    cast: int, members: Members, old: Arrays, width: int, rule: CastRule | None, split: Split
) -> tuple[Arrays, Arrays]:
    """The copy as it was, with all columns; and what to write on: the same,
    or on shards of columns room for the columns that are here."""
    if len(members) == 1:
        return old, old
    names, columns = arrays_by(rule), f"c{cast}in"
    dims = [(columns, "") if _is_transposed(name) else ("", columns) for name in names]
    whole = tuple(gathered(x, split, *of) if x.ndim else x for x, of in zip(old, dims, strict=True))
    if not is_split(members, split):
        return whole, whole
    room = (_room(name, x, (old[0].shape[0], width)) for name, x in zip(names, old, strict=True))
    return whole, tuple(room)


def with_all_columns(
    members: Members,
    widths: Sequence[int],
    written: Arrays,
    old: Arrays,
    rule: CastRule | None,
    split: Split,
    unchanged: jax.Array,
) -> Arrays:
    """A copy that was written on this shard, with the columns of all shards; or as it was."""
    if not is_split(members, split):
        return written
    ends = list(accumulate(widths))[:-1]

    def whole(name: str, array: jax.Array, before: jax.Array):
        if not array.ndim:
            return array
        dim, length = int(not _is_transposed(name)), SQUARE[1] if name.startswith("scale") else 1
        pieces, leading = jnp.split(array, [end // length for end in ends], axis=dim), [""] * dim
        gathered_pieces = [
            gathered(piece, split, *leading, column_dim(n)) for piece, n in zip(pieces, members, strict=True)
        ]
        return jnp.where(unchanged, before, jnp.concatenate(gathered_pieces, axis=dim))

    return tuple(whole(*of) for of in zip(arrays_by(rule), written, old, strict=True))


def _is_transposed(name: str) -> bool:
    return name.endswith("_t")


def _room(name: str, like: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """For an array of a copy (k, n)."""
    if not like.ndim:
        return like
    shape = shape[::-1] if _is_transposed(name) else shape
    return jnp.zeros(tiles_of(shape, SQUARE) if name.startswith("scale") else shape, like.dtype)

"""Random numbers for stochastic rounding in the optimizer, hashed from a seed, the number of a leaf and the index of an
element. So there is no generator state, and a resumed run draws the same numbers.

The index is that in the whole leaf, in row-major order: a device with a shard draws for each element the number that
one device would draw. An index is two words of 32 bits, since jax has no wider integers by default:

    index = low + 2**32 high
    hash = mix(low * a + high * b + seed * c + leaf * d)        first draw: the hash; second draw: mixed once more

`csrc/device/draws.cuh` computes the same bits. It counts the elements of a shard in memory order, and skips those on
other devices: for every dim that is split, the dims after it form a block, with a gap between two blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jax_fp8.core.types import PyTree
from jax_fp8.kernels.dispatch import Split
from jax_fp8.kernels.explicit import explicit_mesh, explicit_spec, place

GAPS = 2  # the most that the kernel skips
PLACE_WORDS = 2 + 4 * GAPS


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Place:
    """Where a shard lies in the whole array.

    Args:
      first: the coordinates of its first element, uint32 scalars.
      whole: the shape of the whole array; static.
    """

    first: tuple[jax.typing.ArrayLike, ...]
    whole: tuple[int, ...] = field(metadata={"static": True})

    @classmethod
    def of_all(cls, shape: tuple[int, ...]) -> "Place":
        """Of an array that is here as a whole."""
        return cls((np.uint32(0),) * len(shape), shape)

    @classmethod
    def on_shard(cls, shape: tuple[int, ...], dims: Sequence[str], split: Split) -> "Place":
        """Of a shard of this shape, on a device of a mesh that splits its dims as `split` says."""
        first, whole = [], []
        for size, axes in zip(shape, map(split.get, dims), strict=True):
            first.append(lax.axis_index(axes).astype(jnp.uint32) * np.uint32(size) if axes else np.uint32(0))
            whole.append(size * lax.axis_size(axes) if axes else size)
        return cls(tuple(first), tuple(whole))


class Index(NamedTuple):
    """Indices of elements: uint32 arrays."""

    low: PyTree
    high: PyTree


def index_of(x: jax.Array, whereabouts: Place | None = None) -> Index:
    """The index of every element of an array or a shard, placed as it is."""
    whereabouts = Place.of_all(x.shape) if whereabouts is None else whereabouts
    coordinates = [
        lax.broadcasted_iota(jnp.uint32, x.shape, dim) + first for dim, first in enumerate(whereabouts.first)
    ]
    low, high = _row_major(coordinates, whereabouts.whole)
    low, high = (jnp.broadcast_to(jnp.asarray(word, jnp.uint32), x.shape) for word in (low, high))
    mesh = explicit_mesh(x)
    if mesh is None:
        return Index(low, high)
    return Index(*(place(mesh, word, PartitionSpec(*explicit_spec(x))) for word in (low, high)))


def place_words(shapes: Sequence[tuple[int, ...]], whereabouts: Sequence[Place]) -> jax.Array:
    """The places of shards of these shapes for the kernel, uint32[leaves, PLACE_WORDS]: the index of the first element;
    and for each split dim but the first, a multiplier and a shift that divide by the length of a block on this device,
    and the gap after a block. Low words come first.
    """
    rows = [_words(*of_leaf) for of_leaf in zip(shapes, whereabouts, strict=True)]
    if not any(rows):
        return jnp.zeros((len(rows), PLACE_WORDS), jnp.uint32)  # by an operation: a partitioned call takes no constants
    return jnp.stack([jnp.stack([jnp.asarray(word, jnp.uint32) for word in row or [0] * PLACE_WORDS]) for row in rows])


def _words(shape: tuple[int, ...], whereabouts: Place) -> list:
    """The words of one shard; none where it is the whole array."""
    if shape == whereabouts.whole and not any(map(_is_traced, whereabouts.first)):
        return []
    whole = whereabouts.whole
    split = [dim for dim, size in enumerate(shape) if dim and size != whole[dim]]
    if len(split) > GAPS or (split and prod(shape) >= 2**32):
        raise ValueError(
            f"a mesh may split the first dim of a param and at most {GAPS} others, where it leaves fewer than 2**32 "
            f"elements, got shards of shape {shape} of {whole}; split fewer dims, or keep the moments in float32"
        )
    gaps = [
        (*_divisor(prod(shape[dim:])), *_two_words(prod(whole[dim + 1 :]) * (whole[dim] - shape[dim]))) for dim in split
    ]
    gaps += [(0,) * 4] * (GAPS - len(gaps))
    return [*_row_major(whereabouts.first, whole), *(np.uint32(word) for of_dim in gaps for word in of_dim)]


def _is_traced(first: jax.typing.ArrayLike) -> bool:
    return isinstance(first, jax.Array)


def _two_words(number: int) -> tuple[int, int]:
    return number % 2**32, number // 2**32


def _divisor(divisor: int) -> tuple[int, int]:
    """The multiplier and the shift by which the kernel divides 32 bits."""
    shift = max(divisor - 1, 0).bit_length()
    return (2**32 * (2**shift - divisor) // max(divisor, 1) + 1) % 2**32, shift


def check_dims(shape: tuple[int, ...]) -> None:
    """Raise where a coordinate would not be one word."""
    if any(size >= 2**32 for size in shape):
        raise ValueError(
            "every dim of a param must have fewer than 2**32 elements where moments have fewer than 32 bits, "
            f"got shape {shape}; give it another dim, or keep the moments in float32"
        )


def draws_of(index: Index, seed: jax.Array, leaf: jax.typing.ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Two random uint32 numbers for every element, statistically independent of each other."""
    leaf_term = jnp.asarray(leaf, jnp.uint32) * np.uint32(0xC2B2AE3D)
    h = index.low * np.uint32(0x9E3779B1) + index.high * np.uint32(0x27D4EB2F)
    h = h + (seed * np.uint32(0x85EBCA77) + leaf_term)
    h = (h ^ (h >> 16)) * np.uint32(0x7FEB352D)
    h = (h ^ (h >> 15)) * np.uint32(0x846CA68B)
    first = h ^ (h >> 16)
    return first, (first ^ (first >> 15)) * np.uint32(0x2C1B3C6D)


def _row_major(coordinates: Sequence[jax.typing.ArrayLike], shape: tuple[int, ...]) -> Index:
    """The index of coordinates in an array of this shape."""
    low, high = np.uint32(0), np.uint32(0)
    for coordinate, size in zip(coordinates, shape, strict=True):
        if prod(shape) <= 2**32:
            low = low * np.uint32(size) + coordinate
            continue
        product, carried = _product(low, np.uint32(size))
        low, high = product + coordinate, high * np.uint32(size) + carried
        high = high + (low < product).astype(np.uint32)
    return Index(low, high)


def _product(x: PyTree, factor: np.uint32) -> Index:
    """A word times a word, from products of 16 bits each."""
    (x_low, x_high), (low, high) = ((word & 0xFFFF, word >> 16) for word in (x, factor))
    middle = (x_low * low >> 16) + (x_low * high & 0xFFFF) + (x_high * low & 0xFFFF)
    carried = x_high * high + (x_low * high >> 16) + (x_high * low >> 16) + (middle >> 16)
    return Index(middle << 16 | (x_low * low & 0xFFFF), carried)

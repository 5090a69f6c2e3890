"""A quantized array, FP8 values beside the float32 scales that give them back their size;
and a matrix in the two orientations that GEMMs want.

A GEMM on Hopper reads both operands contiguous along the contracting dim, and a training step contracts every matrix
along both of its dims. So a matrix (m, n) is kept twice, rowwise (m, n) and columnwise (n, m),
in the words of Transformer Engine.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fp8Array:
    """`x ≈ values * scale`, with `values` in E4M3 or E5M2 and `scale` float32.

    The shape of `scale` is its granularity: f32[] is one scale for the whole array; of an array (m, n) with tiles of
    1 x 128, f32[m, ceil(n / 128)]. The last tile of a dim may be cut: then `tile` must say how long the others are.

    Args:
      values: E4M3 or E5M2, of any shape.
      scale: f32[], or one for each tile.
      tile: how many elements of each dim share a scale; None where it follows from the shapes. Static.
    """

    values: jax.Array
    scale: jax.Array
    tile: tuple[int, ...] | None = field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self):
        return self.values.dtype

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def size(self) -> int:
        return self.values.size

    @property
    def T(self) -> "Fp8Array":
        """The transpose, values and scales; a view for numbers, not an operand of a GEMM."""
        return Fp8Array(self.values.T, self.scale.T, None if self.tile is None else self.tile[::-1])

    @property
    def granularity(self) -> tuple[int, ...]:
        """How many elements of each dim share a scale; the whole shape where there is one scale."""
        if self.scale.ndim == 0:
            return self.shape
        return tile_of(self.shape, self.scale.shape) if self.tile is None else self.tile

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        """`values * scale`, computed in float32 and rounded once to `dtype`."""
        return (self.values.astype(jnp.float32) * spread(self.scale, self.shape, self.tile)).astype(dtype)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        """What NumPy sees: the dequantized numbers, float32 unless it asks for another dtype."""
        if copy is False:
            raise ValueError(
                "an Fp8Array becomes a NumPy array by a multiplication, never without a copy; leave copy out"
            )
        return np.asarray(self.dequantize(), dtype)


def tile_of(shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements of each dim that share a scale, of an array with so many scales."""
    if len(shape) != len(scale_shape) or any(
        not tiles or size % tiles for size, tiles in zip(shape, scale_shape, strict=True)
    ):
        raise ValueError(
            f"scale must be a scalar, or divide each dim of the values {shape} into tiles of one size, "
            f"got shape {scale_shape}"
        )
    return tuple(size // tiles for size, tiles in zip(shape, scale_shape, strict=True))


def tiles_of(shape: tuple[int, ...], tile: tuple[int, ...]) -> Any:
    """How many tiles each dim has, a tuple; the last one may be cut."""
    return tuple(-(-size // length) for size, length in zip(shape, tile, strict=True))


def spread(scale: jax.Array, shape: tuple[int, ...], tile: tuple[int, ...] | None = None) -> jax.Array:
    """Scales as they multiply an array of this shape: a scalar as it is, those of tiles repeated."""
    if scale.ndim == 0:
        return scale
    tile = tile_of(shape, scale.shape) if tile is None else tile
    if scale.shape != tiles_of(shape, tile):
        raise ValueError(
            f"an array {shape} with tiles of {tile} must have scales of shape {tiles_of(shape, tile)}, "
            f"got {scale.shape}; pass one scale for each tile"
        )
    for dim, (size, length) in enumerate(zip(shape, tile, strict=True)):
        scale = lax.slice_in_dim(jnp.repeat(scale, length, axis=dim), 0, size, axis=dim)
    return scale


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class Fp8Pair:
    """A matrix (m, n) in FP8, cast once for both of its GEMMs.

    Each orientation has scales of its own, for tiles along the contracting dim differ. One scale for the whole matrix
    serves both, and is one leaf of the tree: `with_shared_scale` makes such a pair.

    Args:
      rowwise: (m, n), or None where nobody wants it.
      columnwise: the transpose (n, m), or None where nobody wants it, or no GEMM could take it.
      amax: f32[], the largest magnitude of what was cast.
      shares_scale: both orientations have the same scale.
    """

    rowwise: Any
    columnwise: Any
    amax: Any
    shares_scale: bool = False

    @classmethod
    def with_shared_scale(cls, values: Any, values_t: Any, scale: Any, amax: Any) -> "Fp8Pair":
        """A matrix with one scale f32[]; `values_t` None for one orientation."""
        columnwise = None if values_t is None else Fp8Array(values_t, scale)
        return cls(Fp8Array(values, scale), columnwise, amax, shares_scale=columnwise is not None)

    @property
    def arrays(self) -> tuple[Any, Any, Any, Any]:
        """What `with_shared_scale` takes: the values, their transpose or None, the scale and the amax."""
        values_t = None if self.columnwise is None else self.columnwise.values
        return self.rowwise.values, values_t, self.rowwise.scale, self.amax

    def tree_flatten_with_keys(self):
        leaves = {"rowwise": self.rowwise, "columnwise": self.columnwise, "amax": self.amax}
        if self.shares_scale:
            leaves = dict(zip(("values", "values_t", "scale", "amax"), self.arrays, strict=True))
        return [(jax.tree_util.GetAttrKey(name), leaf) for name, leaf in leaves.items()], self.shares_scale

    @classmethod
    def tree_unflatten(cls, shares_scale, children):
        if not shares_scale:
            return cls(*children)
        values, values_t, scale, amax = children
        return cls(Fp8Array(values, scale), Fp8Array(values_t, scale), amax, shares_scale)


def is_fp8(node: Any) -> bool:
    """Whether this node of a tree is an FP8 array: one leaf to an optimizer, though it holds two arrays."""
    return isinstance(node, Fp8Array)

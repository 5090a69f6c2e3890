"""A quantized array: FP8 values and their float32 scales; and a matrix in the two orientations that GEMMs read.

An FP8 GEMM on Hopper reads both operands contiguous along the contracting dim, and a training step contracts every
matrix along both of its dims. So a matrix (m, n) is kept twice, rowwise (m, n) and columnwise (n, m), as Transformer
Engine calls them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8.core.types import PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fp8Array:
    """An array in FP8: `x ≈ values * scale`, with one scale for the whole array or one for each tile.

    The shape of `scale` is its granularity: f32[] is one scale for the whole array; of an array (m, n) with tiles of
    1 x 128, f32[m, ceil(n / 128)]. The last tile of a dim may be cut: then `tile` must say how long the others are.

    Args:
      values: E4M3 or E5M2, of any shape.
      scale: f32[], or one for each tile.
      tile: how many elements of each dim share a scale; None where the shapes tell. Static.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> x = fp8.Fp8Array(jnp.full((2, 4), 3, fp8.E4M3), scale=jnp.float32(0.5))
      >>> x.shape, x.dtype.name, x.granularity
      ((2, 4), 'float8_e4m3fn', (2, 4))
      >>> x.dequantize()[0]
      Array([1.5, 1.5, 1.5, 1.5], dtype=float32)
    """

    values: jax.Array
    scale: jax.Array
    tile: tuple[int, ...] | None = field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def size(self) -> int:
        return self.values.size

    @property
    def T(self) -> "Fp8Array":
        """The transpose of values and scales, to compute with; not the layout that a GEMM reads."""
        return Fp8Array(self.values.T, self.scale.T, None if self.tile is None else self.tile[::-1])

    @property
    def granularity(self) -> tuple[int, ...]:
        """How many elements of each dim share a scale; the whole shape where there is one scale."""
        if self.scale.ndim == 0:
            return self.shape
        return tile_of(self.shape, self.scale.shape) if self.tile is None else self.tile

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        """Compute `values * scale` in float32, and round it once.

        Args:
          dtype: of the result.

        Returns:
          An array in `dtype`, of the shape of `values`.

        Raises:
          ValueError: if the shape of `scale` fits no tiling of `values`.
        """
        return (self.values.astype(jnp.float32) * spread(self.scale, self.shape, self.tile)).astype(dtype)

    def __array__(self, dtype: jax.typing.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        """The array as NumPy sees it: dequantized, float32 unless NumPy asks for another dtype."""
        if copy is False:
            raise ValueError(
                "an Fp8Array becomes a NumPy array by a multiplication, never without a copy; leave copy out"
            )
        return np.asarray(self.dequantize(), dtype)


def tile_of(shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> tuple[int, ...]:
    """How many elements of each dim share a scale, in an array with scales of this shape."""
    if len(shape) != len(scale_shape) or any(
        not tiles or size % tiles for size, tiles in zip(shape, scale_shape, strict=True)
    ):
        raise ValueError(
            f"scale must be a scalar, or divide each dim of the values {shape} into tiles of one size, "
            f"got shape {scale_shape}"
        )
    return tuple(size // tiles for size, tiles in zip(shape, scale_shape, strict=True))


def tiles_of(shape: tuple[int, ...], tile: tuple[int, ...]) -> tuple[int, ...]:
    """How many tiles each dim has; the last one may be cut."""
    return tuple(-(-size // length) for size, length in zip(shape, tile, strict=True))


def spread(scale: jax.Array, shape: tuple[int, ...], tile: tuple[int, ...] | None = None) -> jax.Array:
    """Scales that multiply an array of this shape: a scalar as it is, the scales of tiles repeated for each element."""
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

    Each orientation has scales of its own, because tiles lie along the contracting dim, and the two GEMMs contract
    different dims. One scale for the whole matrix serves both, and is one leaf of the tree: `with_shared_scale` makes
    such a pair.

    Args:
      rowwise: `Fp8Array` (m, n), or None where no GEMM reads it.
      columnwise: `Fp8Array` (n, m), the transpose, or None where no GEMM reads it, or none could.
      amax: f32[], the largest magnitude of the matrix before the cast.
      shares_scale: whether both orientations have the same scale.
    """

    rowwise: PyTree
    columnwise: PyTree
    amax: PyTree
    shares_scale: bool = False

    @classmethod
    def with_shared_scale(
        cls, values: jax.Array, values_t: jax.Array | None, scale: jax.Array, amax: jax.Array
    ) -> "Fp8Pair":
        """A matrix with one scale f32[] for both orientations; with `values_t` None it has the rowwise one only."""
        columnwise = None if values_t is None else Fp8Array(values_t, scale)
        return cls(Fp8Array(values, scale), columnwise, amax, shares_scale=columnwise is not None)

    @property
    def arrays(self) -> tuple[jax.Array, PyTree, jax.Array, jax.Array]:
        """The arguments of `with_shared_scale`: the values, their transpose or None, the scale and the amax."""
        values_t = None if self.columnwise is None else self.columnwise.values
        return self.rowwise.values, values_t, self.rowwise.scale, self.amax

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, PyTree]], bool]:
        leaves = {"rowwise": self.rowwise, "columnwise": self.columnwise, "amax": self.amax}
        if self.shares_scale:
            leaves = dict(zip(("values", "values_t", "scale", "amax"), self.arrays, strict=True))
        return [(jax.tree_util.GetAttrKey(name), leaf) for name, leaf in leaves.items()], self.shares_scale

    @classmethod
    def tree_unflatten(cls, shares_scale: bool, children: Sequence[PyTree]) -> "Fp8Pair":
        if not shares_scale:
            return cls(*children)
        values, values_t, scale, amax = children
        return cls(Fp8Array(values, scale), Fp8Array(values_t, scale), amax, shares_scale)


def is_fp8(node: object) -> bool:
    """Whether this node of a tree is an FP8 array. An optimizer takes it as one leaf, though it holds two arrays."""
    return isinstance(node, Fp8Array)

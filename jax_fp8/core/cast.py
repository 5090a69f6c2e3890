"""How a tensor is cast to FP8, as one value: to which dtype, in which tiles, and where its scale comes from.

A recipe makes it, kernels follow it, and no code in between looks inside.

    recipe.cast(tensor, scales, measure) → Cast → quantize, norm, activation → Fp8Pair

The kernel that casts picks its scale out of several, or computes it from an amax, by itself. As XLA operations these
few instructions would be one launch each, three times for every GEMM.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

Formula = Callable[[jax.Array, jax.typing.DTypeLike], jax.Array]  # (amax, dtype) -> scale; see `ScaleFormula`
Tile = tuple[int, int]  # rows and columns of a matrix that share a scale
LINE, SQUARE = (1, 128), (128, 128)  # the tiles of block scaling: what cuBLASLt multiplies on Hopper


@dataclass(frozen=True)
class CastRule:
    """The static part of a cast.

    Args:
      dtype: E4M3 or E5M2.
      row: which element of the source to use, where the source is a vector.
      formula: computes the scale from an amax; None where the source holds the scale itself.
      tile: the rows and columns of the rowwise matrix that share a scale; None is the whole tensor. By tile, the kernel
        finds the amaxes in the same pass and does not read the source.
      columnwise_tile: the same for the columnwise matrix; None only where `tile` is.
    """

    dtype: jax.typing.DTypeLike
    row: int = 0
    formula: Formula | None = None
    tile: Tile | None = None
    columnwise_tile: Tile | None = None

    def scale(self, element: jax.Array) -> jax.Array:
        """The scale for an element of the source, or for the amaxes of tiles."""
        return element if self.formula is None else self.formula(element, self.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cast:
    """How a tensor is cast: a rule, and the source f32[] or f32[r] that it reads: a scale, scales or an amax."""

    source: jax.Array
    rule: CastRule = field(metadata={"static": True})

    @classmethod
    def with_scale(cls, dtype: jax.typing.DTypeLike, scale: jax.typing.ArrayLike) -> "Cast":
        """With this scale f32[]."""
        scale = jnp.asarray(scale, jnp.float32)
        if scale.shape != ():
            raise ValueError(f"scale must be a scalar, got shape {scale.shape}; quantize with one scale per tensor")
        return cls(scale, CastRule(jnp.dtype(dtype)))

    @classmethod
    def with_row(cls, dtype: jax.typing.DTypeLike, scales: jax.Array, row: int) -> "Cast":
        """With one of several scales f32[r]."""
        scales = jnp.asarray(scales, jnp.float32)
        if scales.ndim != 1 or not 0 <= row < scales.size:
            raise ValueError(
                f"a row of scales must be one of a vector f32[r], got row {row} of shape {scales.shape}; "
                "pass a vector of scales and a row of it"
            )
        return cls(scales, CastRule(jnp.dtype(dtype), row))

    @classmethod
    def from_amax(cls, dtype: jax.typing.DTypeLike, amax: jax.Array, formula: Formula) -> "Cast":
        """With the scale that the formula gives for the tensor's amax f32[]."""
        amax = jnp.asarray(amax, jnp.float32)
        if amax.shape != ():
            raise ValueError(f"an amax must be a scalar, got shape {amax.shape}; pass that of the whole tensor")
        return cls(amax, CastRule(jnp.dtype(dtype), formula=formula))

    @classmethod
    def by_tile(
        cls, dtype: jax.typing.DTypeLike, tile: Tile, formula: Formula, columnwise_tile: Tile | None = None
    ) -> "Cast":
        """With one scale for each tile, from its own amax; by default both orientations have tiles of one shape."""
        tiles = tile, columnwise_tile or tile
        for one in tiles:
            if not isinstance(one, tuple) or len(one) != 2 or any(length < 1 for length in one):
                raise ValueError(f"a tile must be a tuple of its rows and columns, at least 1 each, got {one!r}")
        return cls(jnp.asarray(np.float32(1)), CastRule(jnp.dtype(dtype), 0, formula, *tiles))

    @property
    def known_scale(self) -> jax.Array:
        """The scale f32[] of a cast whose source holds it."""
        assert self.rule.formula is None, "the source must hold scales, not an amax"
        return self.source[self.rule.row] if self.source.ndim else self.source

    def again(self, scale: jax.Array) -> "Cast":
        """The cast that gives the same tensor the same bits again, with its scale f32[]; by tile, this one."""
        return self if self.rule.tile is not None else Cast.with_scale(self.rule.dtype, scale)

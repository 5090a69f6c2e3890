"""How a tensor is cast to FP8, as one value: to which dtype, in which tiles, and where its scale comes from.

A recipe makes it, kernels follow it, and nobody in between looks inside.

    recipe.cast(tensor, scales, measure) → Cast → quantize, norm, activation → Fp8Pair

Where a scale is one of several, or follows from an amax, the kernel that casts finds it itself: as operations of their
own these few instructions would be a launch each, three times a GEMM.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Formula = Callable[[jax.Array, Any], jax.Array]  # (amax, dtype) -> scale; see `ScaleFormula`
Tile = tuple[int, int]  # rows and columns of a matrix that share a scale
LINE, SQUARE = (1, 128), (128, 128)  # the tiles of block scaling: what cuBLASLt multiplies on Hopper


@dataclass(frozen=True)
class CastRule:
    """What is static of a cast.

    Args:
      dtype: E4M3 or E5M2.
      row: the element of the source that counts, where it is a vector.
      formula: how the scale follows from an amax; None where the source holds the scale itself.
      tile: what shares a scale of the rowwise orientation; None is the whole tensor. By tile, amaxes are found in the
        same pass, and the source says nothing.
      columnwise_tile: the same of the columnwise orientation, a matrix of its own; None only where `tile` is.
    """

    dtype: Any
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
    """How a tensor is cast: a rule, and the array f32[] or f32[r] that it begins with, a scale, scales or an amax."""

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
        """With the scale that follows from the tensor's amax f32[]."""
        amax = jnp.asarray(amax, jnp.float32)
        if amax.shape != ():
            raise ValueError(f"an amax must be a scalar, got shape {amax.shape}; pass that of the whole tensor")
        return cls(amax, CastRule(jnp.dtype(dtype), formula=formula))

    @classmethod
    def by_tile(
        cls, dtype: jax.typing.DTypeLike, tile: Tile, formula: Formula, columnwise_tile: Tile | None = None
    ) -> "Cast":
        """With a scale a tile of each orientation, by its own amax; by default both have tiles of one shape."""
        tiles = tile, columnwise_tile or tile
        for one in tiles:
            if not isinstance(one, tuple) or len(one) != 2 or any(length < 1 for length in one):
                raise ValueError(f"a tile must be a tuple of its rows and columns, at least 1 each, got {one!r}")
        return cls(jnp.asarray(np.float32(1)), CastRule(jnp.dtype(dtype), 0, formula, *tiles))

    @property
    def known_scale(self) -> jax.Array:
        """The scale f32[] of a cast that begins with it."""
        assert self.rule.formula is None, "the source is a scale, or one of several"
        return self.source[self.rule.row] if self.source.ndim else self.source

    def again(self, scale: jax.Array) -> "Cast":
        """The cast that gives the same tensor the same bits once more, when its scale f32[] is known;
        by tile, this one.
        """
        return self if self.rule.tile is not None else Cast.with_scale(self.rule.dtype, scale)

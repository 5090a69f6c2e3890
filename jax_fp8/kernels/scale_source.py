"""Where the scale of a tensor comes from when the kernel that quantizes it finds it itself: one of a vector of scales, or made from an amax.

Both are a few instructions, and as operations of their own would be a kernel launch each, three times a GEMM. An op passes the array as an
operand and the rest, which is static, as attributes; the scale that was used comes back as a result.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.recipe import CurrentScaling, DelayedScaling, Recipe
from jax_fp8.core.scale import current_scale
from jax_fp8.kernels.dispatch import Split, gathered

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)  # an amax or a scale, as a kernel returns it


@dataclass(frozen=True)
class ScaleRule:
    """What is static of a `ScaleSource`: the element of its array, and how to scale by it when it is an amax."""

    row: int
    recipe: Recipe | None

    def attributes(self) -> dict:
        """The same in the kernels' words."""
        current = self.recipe if isinstance(self.recipe, CurrentScaling) else None
        delayed = self.recipe if isinstance(self.recipe, DelayedScaling) else None
        return {
            "row": np.int32(self.row),
            "from_amax": self.recipe is not None,
            "margin": np.int32(delayed.margin if delayed else 0),
            "amax_epsilon": np.float32(current.amax_epsilon if current else 0),
            "power_2_scale": current is not None and current.power_2_scale,
        }

    def scale(self, array: jax.Array, dtype: jax.typing.DTypeLike, split: Split) -> jax.Array:
        """What the kernels make of it: the scale f32[] for values of this dtype."""
        element = gathered(array, split, "r")[self.row] if array.ndim else array
        return element if self.recipe is None else current_scale(element, dtype, self.recipe)


@dataclass(frozen=True)
class ScaleSource:
    """Where the scale of a tensor comes from; see `row_of` and `from_amax`.

    Args:
      array: f32[] or f32[r].
      row: the element of `array`; 0 for a scalar.
      recipe: None when the element is a scale, or how to scale by it when it is the tensor's amax.
    """

    array: jax.Array
    row: int = 0
    recipe: Recipe | None = None

    @classmethod
    def row_of(cls, scales: jax.Array, row: int) -> "ScaleSource":
        """This one of several scales f32[r]."""
        return cls(scales, row)

    @classmethod
    def from_amax(cls, amax: jax.Array, recipe: Recipe) -> "ScaleSource":
        """`current_scale` of the tensor's amax f32[]."""
        return cls(amax, recipe=recipe)

    @classmethod
    def of(cls, scale: "jax.typing.ArrayLike | ScaleSource") -> "ScaleSource":
        """A scale f32[] or a source, checked."""
        if not isinstance(scale, ScaleSource):
            scale = jnp.asarray(scale, jnp.float32)
            if scale.shape != ():
                raise ValueError(f"scale must be a scalar, got shape {scale.shape}; quantize with one scale per tensor")
            return ScaleSource(scale)
        array = jnp.asarray(scale.array, jnp.float32)
        if array.ndim > 1 or not 0 <= scale.row < array.size:
            raise ValueError(
                f"a scale's source must be f32[] or f32[r] with the row it names, got shape {array.shape} and row {scale.row}; "
                "pass a vector of scales and a row of it"
            )
        return replace(scale, array=array)

    @property
    def rule(self) -> ScaleRule:
        return ScaleRule(self.row, self.recipe)

    @property
    def dims(self) -> str:
        """The array's part of a dispatch rule. Kernels need all of it: a row of a shard would be another row."""
        return "r" if self.array.ndim else ""

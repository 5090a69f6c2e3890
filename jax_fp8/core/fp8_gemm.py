"""One GEMM as an op meets it: its recipe, its scales, its weight if that was cast already, and the way out for amaxes."""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jax_fp8.core.cast import Cast
from jax_fp8.core.fp8_array import Fp8Pair
from jax_fp8.core.recipe import Recipe, accumulation


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GradientSum:
    """Where the gradients of a kernel add up over microbatches: `ref += weight * gradient`, by the GEMM that computes the gradient.

    Args:
      refs: of f32[k, n_i], one for each of the kernels side by side.
      weight: static.
    """

    refs: tuple[jax.Ref, ...]
    weight: float = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Record:
    """The Refs of one GEMM while gradients are taken.

    Args:
      amax_ref: of f32[..., 3], collects amaxes by maximum; None where there is no state.
      slot: this GEMM's row of a Ref that layers under `nn.scan` share, else None.
      gradient: where to add the kernel's gradient instead of returning it, else None.
    """

    amax_ref: jax.Ref | None = None
    slot: jax.Array | None = None
    gradient: GradientSum | None = None

    def amaxes(self, amaxes: jax.Array) -> None:
        """Raise the first recorded amaxes to f32[rows]; without a Ref, nothing. Recording twice is recording once."""
        if self.amax_ref is None:
            return
        rows = slice(0, amaxes.shape[0])
        index = rows if self.slot is None else (self.slot, rows)
        self.amax_ref[index] = jnp.maximum(self.amax_ref[index], amaxes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fp8Gemm:
    """What a layer hands to a composite op.

    Args:
      recipe: static.
      layer: the layer's path, for error messages; static.
      scales: f32[3] (input, kernel, output gradient) of the state; None for a recipe without, and where every tensor is to be scaled by its own amax.
      record: the way out of the pass.
      weight: the kernel where it has been cast already, else None.
    """

    recipe: Recipe = field(metadata={"static": True})
    layer: str = field(metadata={"static": True})
    scales: jax.Array | None = None
    record: Record = Record()
    weight: Fp8Pair | None = None

    def cast(self, tensor: int, measure: Callable[[], jax.Array]) -> Cast:
        """How INPUT, KERNEL or OUTPUT_GRADIENT is cast; `measure` finds its amax f32[] where the recipe wants it first."""
        return self.recipe.cast(tensor, self.scales, measure)

    def accumulation(self, gemm: str) -> str:
        """How "fprop", "dgrad" or "wgrad" accumulates, as `matmul` takes it."""
        return accumulation(self.recipe, gemm)

    @property
    def name(self) -> str:
        """The last name of the path."""
        return self.layer.rsplit("/", 1)[-1]

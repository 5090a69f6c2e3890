"""How one GEMM scales its three tensors and where their amaxes go: what a layer hands to a composite op."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jax_fp8.core.fp8_array import Fp8Pair
from jax_fp8.core.recipe import Recipe


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GradientSum:
    """Where the gradients of a kernel add up over microbatches: `ref += weight * gradient`, by the GEMM that computes the gradient.

    Args:
      ref: of f32[k, n].
      weight: static.
    """

    ref: jax.Ref
    weight: float = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GemmScaling:
    """The scaling of one GEMM.

    Args:
      recipe: static.
      layer: the layer's path, for error messages; static.
      from_current: measure each tensor and scale it by its own amax (current scaling, and the warm start of delayed scaling); static.
      scale: f32[3] (input, kernel, output gradient) of delayed scaling, else None.
      amax_ref: a Ref of f32[..., 3] that collects amaxes by maximum while `value_and_grad` runs, else None.
      slot: this GEMM's row in a Ref shared by layers under `nn.scan`, else None.
      weight: the kernel where it has been cast already, else None.
      gradient: where to add the kernel's gradient instead of returning it, else None.
    """

    recipe: Recipe = field(metadata={"static": True})
    layer: str = field(metadata={"static": True})
    from_current: bool = field(metadata={"static": True})
    scale: jax.Array | None = None
    amax_ref: jax.Ref | None = None
    slot: jax.Array | None = None
    weight: Fp8Pair | None = None
    gradient: GradientSum | None = None

    def record(self, amaxes: jax.Array) -> None:
        """Raise the first recorded amaxes to f32[rows]; without a Ref, nothing. Recording twice is recording once."""
        if self.amax_ref is None:
            return
        rows = slice(0, amaxes.shape[0])
        index = rows if self.slot is None else (self.slot, rows)
        self.amax_ref[index] = jnp.maximum(self.amax_ref[index], amaxes)

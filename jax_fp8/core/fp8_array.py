"""A quantized array: FP8 values beside the float32 scale that gives them back their size."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fp8Array:
    """`x ≈ values * scale`, with `values` in E4M3 or E5M2 and `scale` a float32 scalar (one scale for the whole array)."""

    values: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self):
        return self.values.dtype

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        """`values * scale`, computed in float32 and rounded once to `dtype`."""
        return (self.values.astype(jnp.float32) * self.scale).astype(dtype)

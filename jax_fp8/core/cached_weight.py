"""A weight that has been cast to FP8 already, in the two orientations its GEMMs want."""

from dataclasses import dataclass
from typing import Any

import jax

from jax_fp8.core.fp8_array import Fp8Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CachedWeight:
    """`weight ≈ values * scale`: `values` (k, n), `values_t` (n, k), their `scale` f32[], and the weight's `amax` f32[] when it was cast.

    `values_t` is None where no GEMM could take it: a dim is not a multiple of 16.
    """

    values: jax.Array
    values_t: Any
    scale: jax.Array
    amax: jax.Array

    @property
    def straight(self) -> Fp8Array:  # (k, n)
        return Fp8Array(self.values, self.scale)

    @property
    def transposed(self) -> Fp8Array:  # (n, k)
        return Fp8Array(self.values_t, self.scale)

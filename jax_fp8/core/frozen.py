"""Frozen weights: kernels that a model reads in FP8 and never trains, one byte each.

    params/<layer>/kernel ─freeze_kernels→ fp8_frozen/<gemm>/kernel, an `Fp8Pair` with the transpose (n, k) alone

A frozen GEMM has no kernel among the params. So it has no gradient, no master and no moments, and its backward runs no
wgrad GEMM. The forward reads the transpose as it is stored. The backward transposes it once more, for dgrad.
"""

from dataclasses import dataclass

import jax

from jax_fp8.core.paths import LayerPath, at_path
from jax_fp8.core.types import Variables

FROZEN = "fp8_frozen"  # the collection


@jax.tree_util.register_static
@dataclass(frozen=True)
class FrozenKernel:
    """Stands among the parameters of a GEMM for a kernel (k, n) whose weight is frozen. It has a shape and no array, so
    it is its own cotangent.
    """

    shape: tuple[int, int]

    @property
    def columns_over(self) -> tuple[str, ...]:
        """As `ParamInfo.columns_over`: no mesh axis splits a frozen weight."""
        return ()


def is_frozen(variables: Variables, gemm: LayerPath) -> bool:
    """Whether the weight of a GEMM is frozen in these variables."""
    return "kernel" in (at_path(variables.get(FROZEN, {}), gemm) or {})

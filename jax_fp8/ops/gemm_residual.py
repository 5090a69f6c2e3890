"""What the forward of a GEMM keeps for its backward."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.cast import Cast
from jax_fp8.core.formats import INPUT
from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair
from jax_fp8.core.fp8_gemm import CAST_STATISTICS, OBSERVED, Fp8Gemm
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.explicit import whole_along
from jax_fp8.kernels.transpose import transpose


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GemmResidual:
    """The residuals of one GEMM for its backward.

    Args:
      x_transposed: (k, m), or None where the backward quantizes x again.
      x_cast: the cast that does so, to the same bits.
      kernel: (k, n), or of a frozen weight (n, k), or a tuple of (n_i, k).
      amaxes: f32[2], of input and kernel.
      x_health: f32[STATISTICS] of the input's cast, or None.
    """

    x_transposed: Fp8Array | None
    x_cast: Cast
    kernel: PyTree
    amaxes: jax.Array
    x_health: jax.Array | None = None
    is_transposed: bool = field(default=False, metadata={"static": True})

    def kernel_for_dgrad(self, after: jax.Array) -> Fp8Array:
        """The kernel (k, n); a frozen weight is transposed here, once `after` is there."""
        if not self.is_transposed:
            return self.kernel
        kernel = as_one_array(self.kernel, after)
        kernel, _ = lax.optimization_barrier((kernel, after))  # else XLA may transpose all weights in advance
        return replace(kernel.T, values=transpose(kernel.values))

    def record(self, dy: Fp8Pair, gemm: Fp8Gemm) -> Fp8Gemm | None:
        """Record amaxes and statistics at the end of the GEMM's backward; returns the cotangent of `gemm`."""
        gemm.record.measure(CAST_STATISTICS, self.x_health, OBSERVED.index(INPUT))
        return gemm.record_backward(jnp.append(self.amaxes, dy.amax))

    def with_input(
        self, requantize: Callable[[jax.Array, Cast], Fp8Pair], source: jax.Array, after: jax.Array
    ) -> "GemmResidual":
        """With xᵀ: if it was not kept, `requantize(source, cast)` computes it again, once `after` is there. A frozen
        weight needs none.
        """
        if self.x_transposed is not None or self.is_transposed:
            return self
        source, _ = lax.optimization_barrier((source, after))  # else XLA may compute it early and keep it after all
        return replace(self, x_transposed=requantize(source, self.x_cast).columnwise)


def as_one_array(kernels: PyTree, after: jax.Array | None = None) -> Fp8Array:
    """Transposes (n_i, k) of kernels that are kept apart as one array (n, k), which is made once `after` is there. One
    array is returned as it is.
    """
    if not isinstance(kernels, tuple):
        return kernels
    kernels, _ = lax.optimization_barrier((kernels, after))  # else XLA may keep what the forward has joined
    first, scales = kernels[0], [kernel.scale for kernel in kernels]
    scale = jnp.concatenate([whole_along(scale, 0) for scale in scales]) if first.scale.ndim else first.scale
    return replace(first, values=jnp.concatenate([whole_along(kernel.values, 0) for kernel in kernels]), scale=scale)

"""Products by a weight that is stored in FP8, without FP8 activations: `y = x · (values * scale)` in the dtype of x.

A layer without a recipe, whose kernel is frozen (core/frozen.py), multiplies by it like this. Every E4M3 value is exact
in 16 bits, so with one scale the sum is the one of the stored weight, multiplied by the scale at its end. With a scale
for each tile, or in float16, the weight is rounded to the dtype of x first. Products of few rows may run on a kernel
that reads the weight in FP8 (kernels/few_rows_gemm.py), and rounds nothing but the result. The weight gets no gradient.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair
from jax_fp8.kernels.amax import as_matrix
from jax_fp8.kernels.explicit import product
from jax_fp8.kernels.few_rows_gemm import is_for_weights_alone, multiply_few_rows
from jax_fp8.ops.gemm_residual import as_one_array


def stored_product(x: jax.Array, weight: Fp8Pair) -> jax.Array:
    """`x` (..., k) times the kernels of a frozen weight side by side, (..., n) in the dtype of `x`."""
    kernel: Fp8Array = lax.stop_gradient(as_one_array(weight.columnwise))  # (n, k)
    rows = as_matrix(x)
    if is_for_weights_alone(rows.shape[0], x.dtype, kernel):
        return _few_rows(rows, kernel).reshape(*x.shape[:-1], -1)
    if kernel.scale.ndim or x.dtype == jnp.float16:  # whose range the unscaled sum may exceed
        return product(x, kernel.dequantize(x.dtype).T)
    y = product(x, kernel.values.astype(x.dtype).T)
    return (y.astype(jnp.float32) * kernel.scale).astype(x.dtype)


@jax.custom_jvp
def _few_rows(x: jax.Array, kernel: Fp8Array) -> jax.Array:
    return multiply_few_rows(x, kernel, dtype=x.dtype)


@_few_rows.defjvp
def _few_rows_jvp(primals: tuple[jax.Array, Fp8Array], tangents: tuple[jax.Array, object]):
    x, kernel = primals
    return _few_rows(x, kernel), product(tangents[0], kernel.dequantize(x.dtype).T)

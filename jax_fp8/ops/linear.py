"""`y = x · kernel + bias` as three FP8 GEMMs, one per pass, and who keeps what between them.

    fprop  y[m, n]  = x[m, k]  · w[n, k]ᵀ       x, w E4M3
    dgrad  dx[m, k] = dy[m, n] · kernel[k, n]ᵀ   dy  E5M2
    wgrad  dw[k, n] = xᵀ[k, m] · dyᵀ[n, m]ᵀ      float32

Each tensor is contracted along both of its dims, so each is quantized once, in both orientations: the forward consumes x and wᵀ, and keeps
xᵀ and w for the backward, in FP8. The bfloat16 `x` is not kept.

`forward_gemm` and `backward_gemm` are these passes without the `custom_vjp`: the composite ops that put a norm or an activation in front
are made of them, and own their gradient as `linear` does. A quantized value never crosses a differentiation boundary.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.core.recipe import CurrentScaling
from jax_fp8.core.scaling import GemmScaling
from jax_fp8.core.state import INPUT, KERNEL, OUTPUT_GRADIENT
from jax_fp8.ops.amax import amax, as_matrix
from jax_fp8.ops.gemm import matmul
from jax_fp8.ops.quantize import quantize_transpose, quantize_with_amax
from jax_fp8.ops.scale_source import ScaleSource

PLAIN_SCOPE = "jax_fp8_plain_linear"
CAST_SCOPE = "cast_weights"  # every cast of a weight, wherever it happens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LinearParameters:
    """`kernel` (k, n) and `bias` (n,) or None."""

    kernel: jax.Array
    bias: jax.Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GemmResidual:
    """What the backward of one GEMM keeps: xᵀ (k, m) and the kernel (k, n) in FP8, and the amaxes f32[2] they were measured with."""

    x_transposed: Fp8Array
    kernel: Fp8Array
    amaxes: jax.Array


def linear(
    x: jax.Array, parameters: LinearParameters, scaling: GemmScaling | None, dtype: jax.typing.DTypeLike = jnp.bfloat16
) -> tuple[jax.Array, jax.Array | None]:
    """Multiply `x` (..., k) by the kernel and add the bias.

    Args:
      x: (..., k), any leading dims.
      parameters: kernel and bias in the params' dtype.
      scaling: how to quantize, or None for a plain product in `dtype`.
      dtype: of the result.

    Returns:
      (..., n) in `dtype`, and the amaxes of input and kernel f32[2] (None without scaling).
    """
    x = x.astype(dtype)
    if scaling is None:
        return plain_linear(x, parameters, dtype), None
    return _linear(dtype, x, parameters, scaling)


def plain_linear(x: jax.Array, parameters: LinearParameters, dtype) -> jax.Array:
    """The product in `dtype`, without FP8."""
    with jax.named_scope(PLAIN_SCOPE):
        y = x @ parameters.kernel.astype(dtype)
    return y if parameters.bias is None else y + parameters.bias.astype(dtype)


def forward_gemm(
    x: jax.Array, parameters: LinearParameters, scaling: GemmScaling, dtype, keep: bool
) -> tuple[jax.Array, jax.Array, GemmResidual | None]:
    """fprop of `x` (..., k): y (..., n), amaxes f32[2] of input and kernel, and with `keep` what the backward needs."""
    quantize = _quantize_both_ways if keep else _quantize_one_way
    x_fp8, x_transposed, x_amax = quantize(as_matrix(x), INPUT, scaling)
    kernel, kernel_transposed, kernel_amax = _kernel_both_ways(parameters.kernel, scaling)
    with jax.named_scope(f"{_leaf(scaling)}/fprop"):
        y = matmul(
            x_fp8, kernel_transposed, bias=parameters.bias, dtype=dtype, accumulation=_accumulation("fprop", scaling)
        )
    amaxes = jnp.stack([x_amax, kernel_amax])
    residual = GemmResidual(x_transposed, kernel, amaxes) if keep else None
    return y.reshape(*x.shape[:-1], y.shape[-1]), amaxes, residual


def backward_gemm(
    dy: jax.Array, residual: GemmResidual, parameters_like: LinearParameters, scaling: GemmScaling, dtype
) -> tuple[jax.Array, LinearParameters]:
    """dgrad and wgrad from `dy` (..., n): dx (..., k) in `dtype` and the gradients of kernel and bias; records the three amaxes.

    Where `scaling.gradient` collects the kernel's gradients, this one is added there, and None is returned for it.
    """
    rows = as_matrix(dy)
    if rows.shape[0] % 16:
        raise ValueError(
            f"{scaling.layer}: the weight gradient contracts over batch * sequence, which must be a multiple of 16, got {rows.shape[0]}; "
            "change the batch or sequence size, pad, or use recipe=None"
        )
    dy_fp8, dy_transposed, dy_amax = _quantize_both_ways(rows, OUTPUT_GRADIENT, scaling)
    scaling.record(jnp.append(residual.amaxes, dy_amax))
    with jax.named_scope(f"{_leaf(scaling)}/dgrad"):
        dx = matmul(dy_fp8, residual.kernel, dtype=dtype, accumulation=_accumulation("dgrad", scaling))
    with jax.named_scope(f"{_leaf(scaling)}/wgrad"):
        dkernel = _kernel_gradient(residual, dy_transposed, parameters_like.kernel.dtype, scaling)
    bias = parameters_like.bias
    dbias = None if bias is None else jnp.sum(rows, axis=0, dtype=jnp.float32).astype(bias.dtype)
    gradients = LinearParameters(dkernel, dbias)
    return dx.reshape(*dy.shape[:-1], dx.shape[-1]), gradients


def dtypes_of(parameters):
    """Empty arrays of the same dtypes: all that a backward wants of parameters whose values it keeps in FP8, if at all."""
    return jax.tree.map(lambda leaf: jnp.zeros((0,), leaf.dtype), parameters)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(dtype, x, parameters, scaling):
    y, amaxes, _ = forward_gemm(x, parameters, scaling, dtype, keep=False)
    return y, amaxes


def _linear_forward(dtype, x, parameters, scaling):
    y, amaxes, residual = forward_gemm(x, parameters, scaling, dtype, keep=True)
    return (y, amaxes), (residual, dtypes_of(parameters), scaling)


def _linear_backward(dtype, residuals, cotangents):
    dy, _ = cotangents
    residual, parameters_like, scaling = residuals
    dx, gradients = backward_gemm(dy, residual, parameters_like, scaling, dtype)
    return dx, gradients, None


_linear.defvjp(_linear_forward, _linear_backward)


def _kernel_gradient(residual, dy_transposed, dtype, scaling) -> Any:
    product = partial(matmul, residual.x_transposed, dy_transposed, dtype=jnp.float32)
    accumulation = _accumulation("wgrad", scaling)
    if scaling.gradient is None:
        return _placed_like(product(accumulation=accumulation).astype(dtype), residual.kernel.values)
    total = scaling.gradient.ref[...]
    added = product(c=total, alpha=scaling.gradient.weight, accumulation=accumulation)
    scaling.gradient.ref[...] = _placed_like(added, total)
    return None


def _kernel_both_ways(kernel, scaling):
    """The kernel in FP8, its transpose and its amax: from the weight cache, or made here."""
    if scaling.weight is None:
        with jax.named_scope(CAST_SCOPE):
            return _quantize_both_ways(kernel, KERNEL, scaling)
    return scaling.weight.straight, scaling.weight.transposed, scaling.weight.amax


def _quantize_both_ways(x, row, scaling):
    return quantize_transpose(x, *_dtype_and_source(x, row, scaling))


def _quantize_one_way(x, row, scaling):
    quantized, measured = quantize_with_amax(x, *_dtype_and_source(x, row, scaling))
    return quantized, None, measured


def _dtype_and_source(x, row, scaling):
    fp8_format = scaling.recipe.fp8_format
    dtype = fp8_format.backward if row == OUTPUT_GRADIENT else fp8_format.forward
    if scaling.from_current or isinstance(scaling.recipe, CurrentScaling):
        return dtype, ScaleSource.from_amax(amax(x), scaling.recipe)
    return dtype, ScaleSource.row_of(scaling.scale, row)


def _placed_like(gradient, primal):
    """On an Explicit mesh, a cotangent has the sharding of its primal in its type; elsewhere there is nothing to do."""
    sharding = jax.typeof(primal).sharding
    return gradient if sharding.mesh.empty else jax.reshard(gradient, sharding)


def _leaf(scaling):
    return scaling.layer.rsplit("/", 1)[-1]


def _accumulation(gemm, scaling):
    return "split" if gemm in scaling.recipe.split_accumulator else "fast"

"""`y = x · kernel + bias` as three FP8 GEMMs, one per pass, and who keeps what between them.

    fprop  y[m, n]  = x[m, k]  · w[n, k]ᵀ       x, w E4M3
    dgrad  dx[m, k] = dy[m, n] · kernel[k, n]ᵀ   dy  E5M2
    wgrad  dw[k, n] = xᵀ[k, m] · dyᵀ[n, m]ᵀ      as the params; sums of microbatches float32

Each tensor is contracted along both of its dims, so each is quantized once, in both orientations: the forward consumes x and wᵀ, and keeps
xᵀ and w for the backward, in FP8. The bfloat16 `x` is not kept. A residual is added by the GEMM itself, before the one rounding. A result
that goes separate ways, as queries, keys and values do, is made in parts by one fprop GEMM each, and the gradients of the parts are cast side by
side into one dy: neither is cut from one array nor put together in one.

`forward_gemm` and `backward_gemm` are these passes without the `custom_vjp`, from operands that are quantized already: the composite ops
that put a norm or an activation in front quantize in the same pass over memory, and own their gradient as `linear` does. A quantized
value never crosses a differentiation boundary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.core.recipe import CurrentScaling
from jax_fp8.core.scaling import GemmScaling
from jax_fp8.core.state import INPUT, KERNEL, OUTPUT_GRADIENT
from jax_fp8.kernels.amax import amax, as_matrix
from jax_fp8.kernels.gemm import RESULT_DTYPES, matmul
from jax_fp8.kernels.quantize import (
    MAX_MATRICES,
    Matrices,
    quantize_transpose,
    quantize_transpose_sums,
    quantize_with_amax,
)
from jax_fp8.kernels.scale_source import ScaleSource

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
class Quantized:
    """An operand (m, k) of a GEMM in FP8: itself, its transpose (k, m) where the backward will want it, and its amax f32[]."""

    straight: Fp8Array
    transposed: Fp8Array | None
    amax: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GemmResidual:
    """What the backward of one GEMM keeps: xᵀ (k, m), or None and its scale f32[] where the backward makes it, the kernel (k, n), and both amaxes f32[2]."""

    x_transposed: Fp8Array | None
    x_scale: jax.Array
    kernel: Fp8Array
    amaxes: jax.Array

    def with_input(
        self, requantize: Callable[..., Any], made_of: jax.Array, scaling: GemmScaling, after: jax.Array
    ) -> "GemmResidual":
        """With xᵀ, if it was not kept: `requantize(made_of, dtype, source)` gives it again, to the same bits, once `after` is there."""
        if self.x_transposed is not None:
            return self
        made_of, _ = lax.optimization_barrier((made_of, after))  # or it might be made early, and kept after all
        x_transposed = requantize(made_of, fp8_dtype(INPUT, scaling), ScaleSource.of(self.x_scale))
        return replace(self, x_transposed=x_transposed)


def linear(
    x: jax.Array,
    parameters: LinearParameters,
    scaling: GemmScaling | None,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    *,
    residual: jax.Array | None = None,
    recompute: bool = False,
    parts: tuple[int, ...] | None = None,
) -> tuple[Any, jax.Array | None]:
    """Multiply `x` (..., k) by the kernel and add the bias.

    Args:
      x: (..., k), any leading dims.
      parameters: kernel and bias in the params' dtype.
      scaling: how to quantize, or None for a plain product in `dtype`.
      dtype: of the result.
      residual: (..., n), added to the result.
      recompute: keep `x` for the backward and quantize it again, instead of keeping xᵀ in FP8: less memory where something else keeps `x`.
      parts: the result as a tuple of up to three arrays of so many columns, which add up to n; not with a residual.

    Returns:
      (..., n) in `dtype`, or such a tuple; and the amaxes of input and kernel f32[2] (None without scaling).
    """
    check_parts(parts, parameters, residual)
    x = x.astype(dtype)
    if scaling is None:
        y = plain_linear(x, parameters, dtype)
        return cut(y if residual is None else y + residual.astype(dtype), parts), None
    rows = None if residual is None else as_matrix(residual.astype(dtype))
    out: Any = _linear(_Static(dtype, recompute, parts), as_matrix(x), parameters, scaling, rows)
    y, amaxes = out
    return jax.tree.map(lambda part: part.reshape(*x.shape[:-1], part.shape[-1]), y), amaxes


def plain_linear(x: jax.Array, parameters: LinearParameters, dtype) -> jax.Array:
    """The product in `dtype`, without FP8."""
    with jax.named_scope(PLAIN_SCOPE):
        y = x @ parameters.kernel.astype(dtype)
    return y if parameters.bias is None else y + parameters.bias.astype(dtype)


def check_parts(parts: tuple[int, ...] | None, parameters: LinearParameters, residual: jax.Array | None = None) -> None:
    """Raise unless the result can be had in these parts."""
    columns = parameters.kernel.shape[1]
    if parts is not None and (sum(parts) != columns or min(parts) < 1 or len(parts) > MAX_MATRICES):
        raise ValueError(f"parts must be at most {MAX_MATRICES} widths that add up to {columns} features, got {parts}")
    if parts is not None and residual is not None:
        raise ValueError("a residual is added to a result in one part, got one with parts; add it afterwards")


def cut(y: jax.Array, parts: tuple[int, ...] | None) -> Any:
    """The columns of one array, or a tuple of them by parts."""
    return y if parts is None else tuple(jnp.split(y, list(accumulate(parts))[:-1], axis=-1))


def forward_gemm(
    x: Quantized,
    parameters: LinearParameters,
    scaling: GemmScaling,
    dtype,
    residual: jax.Array | None = None,
    parts: tuple[int, ...] | None = None,
) -> tuple[Any, jax.Array, GemmResidual]:
    """fprop: y (m, n), or its parts, with bias and residual (m, n) added; amaxes f32[2] of input and kernel; and what the backward needs."""
    kernel, kernel_transposed, kernel_amax = _kernel_both_ways(parameters.kernel, scaling)
    product = partial(
        matmul,
        x.straight,
        kernel_transposed,
        bias=parameters.bias,
        c=residual,
        c_in_place=False,  # the backward of a norm keeps the residual stream
        dtype=dtype,
        accumulation=_accumulation("fprop", scaling),
    )
    with jax.named_scope(f"{_leaf(scaling)}/fprop"):
        if parts is None or any(width % 16 for width in parts):  # the tensor cores take no other width
            y = cut(product(), parts)
        else:
            y = tuple(
                product(columns=(end - width, width)) for width, end in zip(parts, accumulate(parts), strict=True)
            )
    amaxes = jnp.stack([x.amax, kernel_amax])
    return y, amaxes, GemmResidual(x.transposed, x.straight.scale, kernel, amaxes)


def backward_gemm(
    dy: Quantized,
    dbias: jax.Array | None,
    residual: GemmResidual,
    parameters_like: LinearParameters,
    scaling: GemmScaling,
    dtype,
) -> tuple[jax.Array, LinearParameters]:
    """dgrad and wgrad: dx (m, k) in `dtype` and the gradients of kernel and bias; records the three amaxes.

    Args:
      dbias: f32[n], the column sums of dy; unused without a bias.

    Where `scaling.gradient` collects the kernel's gradients, this one is added there, and None is returned for it.
    """
    dx = backward_dgrad(dy, residual, scaling, dtype)
    return dx, backward_wgrad(dy, dbias, residual, parameters_like, scaling)


def backward_dgrad(dy: Quantized, residual: GemmResidual, scaling: GemmScaling, dtype) -> jax.Array:
    """The first half of `backward_gemm`, which does without xᵀ."""
    _check_rows(dy.straight.shape[0], scaling)
    scaling.record(jnp.append(residual.amaxes, dy.amax))
    with jax.named_scope(f"{_leaf(scaling)}/dgrad"):
        return matmul(dy.straight, residual.kernel, dtype=dtype, accumulation=_accumulation("dgrad", scaling))


def backward_wgrad(
    dy: Quantized,
    dbias: jax.Array | None,
    residual: GemmResidual,
    parameters_like: LinearParameters,
    scaling: GemmScaling,
) -> LinearParameters:
    """The second half of `backward_gemm`."""
    with jax.named_scope(f"{_leaf(scaling)}/wgrad"):
        dkernel = _kernel_gradient(residual, dy.transposed, parameters_like.kernel.dtype, scaling)
    bias = parameters_like.bias
    return LinearParameters(dkernel, None if bias is None or dbias is None else dbias.astype(bias.dtype))


def fp8_dtype(row: int, scaling: GemmScaling) -> Any:
    """The FP8 dtype of one of a GEMM's three tensors: INPUT, KERNEL or OUTPUT_GRADIENT."""
    fp8_format = scaling.recipe.fp8_format
    return fp8_format.backward if row == OUTPUT_GRADIENT else fp8_format.forward


def scale_source(row: int, scaling: GemmScaling, measure: Callable[[], jax.Array]) -> ScaleSource:
    """Where the scale of a tensor comes from: the state, or the tensor's amax f32[], which `measure` finds."""
    if scaling.from_current or isinstance(scaling.recipe, CurrentScaling):
        return ScaleSource.from_amax(measure(), scaling.recipe)
    assert scaling.scale is not None, "delayed scaling has scales"
    return ScaleSource.row_of(scaling.scale, row)


def quantize_input(x: jax.Array, scaling: GemmScaling, keep: bool) -> Quantized:
    """An input (m, k), with `keep` in both orientations."""
    dtype, source = fp8_dtype(INPUT, scaling), scale_source(INPUT, scaling, partial(amax, x))
    if keep:
        return Quantized(*quantize_transpose(x, dtype, source))
    straight, measured = quantize_with_amax(x, dtype, source)
    return Quantized(straight, None, measured)


def quantize_gradient(
    dy: Matrices, parameters_like: LinearParameters, scaling: GemmScaling
) -> tuple[Quantized, jax.Array | None]:
    """An output gradient (m, n), or its parts, in both orientations, and the bias gradient f32[n] from the same pass, where there is a bias."""
    measure = partial(amax, *jax.tree.leaves(dy))
    dtype, source = fp8_dtype(OUTPUT_GRADIENT, scaling), scale_source(OUTPUT_GRADIENT, scaling, measure)
    if parameters_like.bias is None:
        return Quantized(*quantize_transpose(dy, dtype, source)), None
    straight, transposed, measured, sums = quantize_transpose_sums(dy, dtype, source)
    return Quantized(straight, transposed, measured), sums


def dtypes_of(parameters):
    """Empty arrays of the same dtypes: all that a backward wants of parameters whose values it keeps in FP8, if at all."""
    return jax.tree.map(lambda leaf: jnp.zeros((0,), leaf.dtype), parameters)


@dataclass(frozen=True)
class _Static:
    dtype: jax.typing.DTypeLike
    recompute: bool
    parts: tuple[int, ...] | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(static, x, parameters, scaling, residual):
    quantized = quantize_input(x, scaling, keep=False)
    y, amaxes, _ = forward_gemm(quantized, parameters, scaling, static.dtype, residual, static.parts)
    return y, amaxes


def _linear_forward(static, x, parameters, scaling, residual):
    quantized = quantize_input(x, scaling, keep=not static.recompute)
    y, amaxes, kept = forward_gemm(quantized, parameters, scaling, static.dtype, residual, static.parts)
    return (y, amaxes), (x if static.recompute else None, kept, dtypes_of(parameters), scaling, dtypes_of(residual))


def _linear_backward(static, residuals, cotangents):
    x, kept, parameters_like, scaling, residual_like = residuals
    dy, _ = cotangents
    kept = kept.with_input(lambda *how: quantize_transpose(*how)[1], x, scaling, after=dy)
    dx, gradients = backward_gemm(
        *quantize_gradient(dy, parameters_like, scaling), kept, parameters_like, scaling, static.dtype
    )
    return dx, gradients, None, None if residual_like is None else dy


_linear.defvjp(_linear_forward, _linear_backward)


def _kernel_gradient(residual, dy_transposed, dtype, scaling) -> Any:
    product = partial(matmul, residual.x_transposed, dy_transposed, accumulation=_accumulation("wgrad", scaling))
    if scaling.gradient is None:  # rounded by the GEMM itself where it can
        written = dtype if dtype in RESULT_DTYPES else jnp.float32
        return _placed_like(product(dtype=written).astype(dtype), residual.kernel.values)
    total = scaling.gradient.ref[...]
    added = product(dtype=jnp.float32, c=total, alpha=scaling.gradient.weight)
    scaling.gradient.ref[...] = _placed_like(added, total)
    return None


def _kernel_both_ways(kernel, scaling):
    """The kernel in FP8, its transpose and its amax: from the weight cache, or made here."""
    if scaling.weight is None:
        with jax.named_scope(CAST_SCOPE):
            source = scale_source(KERNEL, scaling, partial(amax, kernel))
            return quantize_transpose(kernel, fp8_dtype(KERNEL, scaling), source)
    return scaling.weight.rowwise, scaling.weight.columnwise, scaling.weight.amax


def _placed_like(gradient, primal):
    """On an Explicit mesh, a cotangent has the sharding of its primal in its type; elsewhere there is nothing to do."""
    sharding = jax.typeof(primal).sharding
    return gradient if sharding.mesh.empty else jax.reshard(gradient, sharding)


def _check_rows(rows, scaling):
    if rows % 16:
        raise ValueError(
            f"{scaling.layer}: the weight gradient contracts over batch * sequence, which must be a multiple of 16, got {rows}; "
            "change the batch or sequence size, pad, or use recipe=None"
        )


def _leaf(scaling):
    return scaling.layer.rsplit("/", 1)[-1]


def _accumulation(gemm, scaling):
    return "split" if gemm in scaling.recipe.split_accumulator else "fast"

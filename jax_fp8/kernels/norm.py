"""LayerNorm and RMSNorm over the last dim, with a forward that keeps its statistics and the backward that uses them.

    layernorm: y = (x - mean) * rstd * scale + bias,  rstd = 1 / sqrt(var + epsilon)
    rmsnorm:   y = x * rstd * scale,                  rstd = 1 / sqrt(mean(x²) + epsilon)

LayerNorm is https://arxiv.org/abs/1607.06450, RMSNorm https://arxiv.org/abs/1910.07467.

All is computed in float32 and rounded once; `normalize` and `normalize_backward` are the `jnp` form. Before an FP8 GEMM
the normalized tensor is needed only in FP8. `norm_quantize` writes its FP8 values from one read of `x`, rounded as if
the tensor had been stored in the dtype of `x`. `norm_backward` also adds the gradient that reaches `x` along the
residual stream, which would otherwise take another pass over memory.

    x ─normalize, round to the dtype of x, cast→ a pair, statistics
    dy, x, statistics, residual ─→ dx, gradients of scale and bias

Rows may be split over devices. Split features are gathered, because every element needs its whole row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8.core.cast import Cast
from jax_fp8.core.fp8_array import Fp8Pair
from jax_fp8.core.shards import largest_amax
from jax_fp8.kernels.amax import amax_reference
from jax_fp8.kernels.casting import NOTHING, SCALAR, PairResults, attributes, check_cast, has_kernel, source_dims
from jax_fp8.kernels.dispatch import Split, dispatch, gathered, parse_rule, split_axes
from jax_fp8.kernels.explicit import whole

NORMS = ("layernorm", "rmsnorm")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NormParameters:
    """`scale` (n,), and `bias` (n,) for LayerNorm or None for RMSNorm."""

    scale: jax.Array
    bias: jax.Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NormStatistics:
    """Statistics of each row for the backward, f32[..., 1]; `mean` is None for RMSNorm."""

    mean: jax.Array | None
    rstd: jax.Array


def normalize(
    x: jax.Array, parameters: NormParameters, epsilon: float, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, NormStatistics]:
    """Normalize `x` (..., n): the result in `dtype`, and its statistics."""
    x, parameters = x.astype(jnp.float32), jax.tree.map(whole, parameters)
    mean = None if parameters.bias is None else jnp.mean(x, axis=-1, keepdims=True)
    centered = x if mean is None else x - mean
    rstd = lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + epsilon)
    y = centered * rstd * lax.broadcast_to_rank(parameters.scale.astype(jnp.float32), x.ndim)
    if parameters.bias is not None:
        y = y + lax.broadcast_to_rank(parameters.bias.astype(jnp.float32), x.ndim)
    return y.astype(dtype), NormStatistics(mean, rstd)


def normalize_backward(
    dy: jax.Array,
    x: jax.Array,
    parameters: NormParameters,
    statistics: NormStatistics,
    residual_gradient: jax.Array | None = None,
) -> tuple[jax.Array, NormParameters]:
    """The gradient of `x` (..., n) plus `residual_gradient`, and those of the parameters, each in its own dtype."""
    dx, dscale, dbias = _gradients(dy, x, parameters.scale, statistics, residual_gradient)
    return dx, _in_dtypes_of(parameters, dscale, dbias)


def norm_quantize(
    x: jax.Array, parameters: NormParameters, epsilon: float, cast: Cast, *, orientations: str = "both"
) -> tuple[Fp8Pair, NormStatistics]:
    """The cast of `normalize(x, parameters, epsilon, x.dtype)[0]` without the tensor in between.

    Args:
      x: (m, n) in float32, bfloat16 or float16.
      parameters: with a bias for LayerNorm, without for RMSNorm.
      epsilon: a Python number.
      cast: of the normalized tensor.
      orientations: "both", or only the "rowwise" or the "columnwise" one.

    Returns:
      The normalized `x` in FP8, and the statistics.
    """
    cast = check_cast(cast, x.dtype)
    _check("norm_quantize", x, parameters)
    results = PairResults(cast.rule, orientations)
    operands = [x, cast.source, *_in_float32(parameters)]
    has_bias = parameters.bias is not None
    rule = f"m k, {source_dims(cast)}, p{', p' * has_bias} -> {results.dims('m n', 'n m')}, m s{', m s' * has_bias}"
    kernel = partial(_quantize_kernel, results, epsilon) if has_kernel(cast.rule) else None
    arrays = list(_dispatch(rule, kernel, partial(_quantize_reference, results, epsilon), *operands))
    mean = arrays.pop() if has_bias else None
    rstd = arrays.pop()
    return results.pair(arrays), NormStatistics(mean, rstd)


def norm_amax(x: jax.Array, parameters: NormParameters, epsilon: float) -> jax.Array:
    """The amax f32[] that `norm_quantize` measures, without quantizing: current scaling needs it first."""
    _check("norm_amax", x, parameters)
    operands = [x, *_in_float32(parameters)]
    rule = f"m k{', p' * (len(operands) - 1)} -> "
    return _dispatch(rule, partial(_amax_kernel, epsilon), partial(_amax_reference, epsilon), *operands)[0]


def norm_backward(
    dy: jax.Array,
    x: jax.Array,
    parameters: NormParameters,
    statistics: NormStatistics,
    residual_gradient: jax.Array | None = None,
) -> tuple[jax.Array, NormParameters]:
    """`normalize_backward` of matrices.

    Args:
      dy, x: (m, n), of one dtype: float32, bfloat16 or float16.
      parameters, statistics: those of the forward.
      residual_gradient: (m, n) of the same dtype, added to the gradient of `x` before it is rounded; or None.

    Returns:
      The gradient of `x` (m, n) in its dtype, and those of the parameters in theirs.
    """
    _check("norm_backward", x, parameters)
    _check_gradients(dy, x, statistics, residual_gradient)
    has_bias, has_residual = parameters.bias is not None, residual_gradient is not None
    operands, rule = [dy, x, parameters.scale.astype(jnp.float32), statistics.rstd], "m k, m k, p, m s"
    if has_bias:
        operands, rule = [*operands, statistics.mean], f"{rule}, m s"
    if has_residual:
        operands, rule = [*operands, residual_gradient], f"{rule}, m k"
    kernel, reference = (partial(form, has_bias, has_residual) for form in (_backward_kernel, _backward_reference))
    dx, dscale, *dbias = _dispatch(f"{rule} -> m n, n{', n' * has_bias}", kernel, reference, *operands)
    return dx, _in_dtypes_of(parameters, dscale, dbias[0] if has_bias else None)


def check_norm(norm: str) -> None:
    """Raise unless `norm` names a norm."""
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {NORMS}, got {norm!r}")


# ---- the kernels and their references --------------------------------------------------------------------------------


def _dispatch(rule: str, kernel: Callable | None, reference: Callable, *operands: jax.Array):
    """`dispatch` of functions that need whole rows: only the dim `m` of their operands stays split."""
    kernel = kernel and partial(_on_whole_rows, rule, kernel)
    return dispatch(rule, kernel, partial(_on_whole_rows, rule, reference), *operands)


def _on_whole_rows(rule: str, form: Callable, *args: jax.Array, split: Split):
    others = {dim: axes for dim, axes in split.items() if dim != "m"}
    whole = [gathered(arg, others, *dims) for arg, dims in zip(args, parse_rule(rule)[0], strict=True)]
    return form(*whole, axes=split_axes(split, "m"))


def _quantize_kernel(
    results: PairResults,
    epsilon: float,
    x: jax.Array,
    source: jax.Array,
    norm_scale: jax.Array,
    norm_bias: jax.Array | None = None,
    axes: tuple[str, ...] = (),
):
    column = (x.shape[0], 1)
    mean = jax.ShapeDtypeStruct(NOTHING if norm_bias is None else column, jnp.float32)
    shapes = [*results.shapes(x.shape), mean, jax.ShapeDtypeStruct(column, jnp.float32)]
    settings = {"epsilon": np.float32(epsilon), **attributes(results.rule)}
    target = "jax_fp8_norm_quantize" if results.rule.tile is None else "jax_fp8_norm_quantize_by_tile"
    operands = *results.operands(x, source), norm_scale, _or_nothing(norm_bias, (0,))
    *pair, mean, rstd = jax.ffi.ffi_call(target, shapes)(*operands, **settings)
    return *results.from_kernel(pair, {"m": axes}, "m", "n"), rstd, *([] if norm_bias is None else [mean])


def _quantize_reference(
    results: PairResults,
    epsilon: float,
    x: jax.Array,
    source: jax.Array,
    norm_scale: jax.Array,
    norm_bias: jax.Array | None = None,
    axes: tuple[str, ...] = (),
):
    y, statistics = _normalize_rounded(epsilon, x, norm_scale, norm_bias)
    mean = [] if norm_bias is None else [statistics.mean]
    return *results.from_reference(y, source, {"m": axes}, "m", "n"), statistics.rstd, *mean


def _amax_kernel(
    epsilon: float, x: jax.Array, norm_scale: jax.Array, norm_bias: jax.Array | None = None, *, axes: tuple[str, ...]
):
    call = jax.ffi.ffi_call("jax_fp8_norm_amax", SCALAR)
    return (largest_amax(call(x, norm_scale, _or_nothing(norm_bias, (0,)), epsilon=np.float32(epsilon)), axes),)


def _amax_reference(
    epsilon: float, x: jax.Array, norm_scale: jax.Array, norm_bias: jax.Array | None = None, *, axes: tuple[str, ...]
):
    return (largest_amax(amax_reference(_normalize_rounded(epsilon, x, norm_scale, norm_bias)[0]), axes),)


@partial(jax.jit, static_argnums=0)  # jit always, for equal bits everywhere: the order of XLA's sums depends on fusion
def _normalize_rounded(epsilon: float, x: jax.Array, norm_scale: jax.Array, norm_bias: jax.Array | None):
    y, statistics = normalize(x, NormParameters(norm_scale, norm_bias), epsilon, x.dtype)
    return lax.optimization_barrier(y), statistics  # else XLA removes the rounding to the dtype of x


def _backward_kernel(
    has_mean: bool,
    has_residual: bool,
    dy: jax.Array,
    x: jax.Array,
    norm_scale: jax.Array,
    rstd: jax.Array,
    *others: jax.Array,
    axes: tuple[str, ...],
):
    mean, residual = others[0] if has_mean else None, others[-1] if has_residual else None
    n = x.shape[1]
    partials = (_partial_sums(n), n)
    results = [
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct((n,), jnp.float32),
        jax.ShapeDtypeStruct((n if has_mean else 0,), jnp.float32),
        jax.ShapeDtypeStruct(partials, jnp.float32),
        jax.ShapeDtypeStruct(partials if has_mean else NOTHING, jnp.float32),
    ]
    call = jax.ffi.ffi_call("jax_fp8_norm_backward", results)
    optional = _or_nothing(residual, NOTHING, x.dtype), norm_scale, _or_nothing(mean, NOTHING)
    dx, dscale, dbias, *_ = call(dy, x, *optional, rstd)
    return dx, *(lax.psum(sums, axes) if axes else sums for sums in (dscale, dbias)[: 1 + has_mean])


def _backward_reference(
    has_mean: bool,
    has_residual: bool,
    dy: jax.Array,
    x: jax.Array,
    norm_scale: jax.Array,
    rstd: jax.Array,
    *others: jax.Array,
    axes: tuple[str, ...],
):
    mean, residual = others[0] if has_mean else None, others[-1] if has_residual else None
    dx, dscale, dbias = _gradients(dy, x, norm_scale, NormStatistics(mean, rstd), residual)
    return dx, *(lax.psum(sums, axes) if axes else sums for sums in (dscale, dbias)[: 1 + has_mean])


def _gradients(
    dy: jax.Array, x: jax.Array, norm_scale: jax.Array, statistics: NormStatistics, residual_gradient: jax.Array | None
):
    """dx in the dtype of `x`, and the gradients of scale and bias (or None) in float32."""
    dtype, dy, rstd = x.dtype, dy.astype(jnp.float32), statistics.rstd
    centered = x.astype(jnp.float32) if statistics.mean is None else x.astype(jnp.float32) - statistics.mean
    normalized = centered * rstd
    leading = tuple(range(dy.ndim - 1))
    dscale = jnp.sum(dy * normalized, axis=leading)
    dnormalized = dy * lax.broadcast_to_rank(norm_scale.astype(jnp.float32), dy.ndim)
    dx = dnormalized - normalized * jnp.mean(dnormalized * normalized, axis=-1, keepdims=True)
    dbias = None
    if statistics.mean is not None:
        dbias = jnp.sum(dy, axis=leading)
        dx = dx - jnp.mean(dnormalized, axis=-1, keepdims=True)
    dx = dx * rstd
    if residual_gradient is not None:
        dx = dx + residual_gradient.astype(jnp.float32)
    return dx.astype(dtype), dscale, dbias


def _partial_sums(n: int) -> int:
    """Blocks of the backward, each with column sums of its own: two for each of 132 SMs, more where rows are short."""
    return 264 * min(max(2048 // n, 1), 4)


def _in_float32(parameters: NormParameters) -> list[jax.Array]:
    return [leaf.astype(jnp.float32) for leaf in (parameters.scale, parameters.bias) if leaf is not None]


def _in_dtypes_of(parameters: NormParameters, dscale: jax.Array, dbias: jax.Array | None) -> NormParameters:
    dbias = None if parameters.bias is None or dbias is None else dbias.astype(parameters.bias.dtype)
    return NormParameters(dscale.astype(parameters.scale.dtype), dbias)


def _or_nothing(
    array: jax.Array | None, shape: tuple[int, ...], dtype: jax.typing.DTypeLike = jnp.float32
) -> jax.Array:
    return jnp.zeros(shape, dtype) if array is None else array


def _check(operation: str, x: jax.Array, parameters: NormParameters):
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"{operation} needs float32, bfloat16 or float16, got {x.dtype}; cast first")
    if x.ndim != 2 or x.shape[1] == 0:
        raise ValueError(f"{operation} needs a matrix with features, got shape {x.shape}; flatten the leading dims")
    for name in ("scale", "bias"):
        leaf = getattr(parameters, name)
        if leaf is not None and leaf.shape != x.shape[1:]:
            raise ValueError(
                f"{operation} needs a norm's {name} of shape {x.shape[1:]}, got {leaf.shape}; "
                "pass one number per feature"
            )


def _check_gradients(dy: jax.Array, x: jax.Array, statistics: NormStatistics, residual_gradient: jax.Array | None):
    for name, array in (("dy", dy), ("residual_gradient", residual_gradient)):
        if array is not None and (array.shape, array.dtype) != (x.shape, x.dtype):
            raise ValueError(
                f"norm_backward needs {name} like x, {x.dtype}{x.shape}, got {array.dtype}{array.shape}; "
                "cast or flatten it"
            )
    for name, array in (("mean", statistics.mean), ("rstd", statistics.rstd)):
        if array is not None and array.shape != (x.shape[0], 1):
            raise ValueError(
                f"norm_backward needs a {name} per row, shape {(x.shape[0], 1)}, got {array.shape}; "
                "pass what norm_quantize returned"
            )

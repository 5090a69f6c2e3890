"""Linear maps of a mixture of experts as three grouped FP8 GEMMs: each group of rows times its expert's kernel.

    fprop  y[r, n]     = x[r, k]  · kernel[e, k, n]           x, kernel E4M3
    dgrad  dx[r, k]    = dy[r, n] · kernel[e, k, n]ᵀ          dy E5M2
    wgrad  dw[e, k, n] = Σ xᵀ[k, r] · dyᵀ[n, r]ᵀ              over the rows r of expert e

The rows are those of ops/expert_rows.py; a cast treats them as any other matrix. The kernels of all experts,
(experts, k, n), are cast as one matrix (experts * k, n) with one scale and one amax, or by tile. By tile k must be a
multiple of 128, so that no two experts share a square. The cast writes the transpose as (n, experts, k), and `fprop`
reads its matrices where they are, side by side.

Kernels may stand side by side, as in ops/passes.py. There is no bias.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.formats import KERNEL
from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair
from jax_fp8.core.fp8_gemm import Fp8Gemm
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.explicit import explicit_spec
from jax_fp8.kernels.gemm import RESULT_DTYPES
from jax_fp8.kernels.grouped_gemm import grouped_matmul, grouped_weight_gradient
from jax_fp8.kernels.quantize import as_tuple
from jax_fp8.kernels.vma import match_vma
from jax_fp8.ops.expert_rows import ExpertRows, on_own_tokens
from jax_fp8.ops.gemm_residual import GemmResidual
from jax_fp8.ops.operands import GemmInput, quantize_gradient, quantize_input
from jax_fp8.ops.parameters import LinearParameters, ParamInfo, as_one_matrix, infos_of, joined
from jax_fp8.ops.passes import PLAIN_SCOPE, cast_weight


def grouped_linear(
    rows: jax.Array,
    parameters: LinearParameters,
    where: ExpertRows,
    gemm: Fp8Gemm | None,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> tuple[jax.Array, jax.Array | None]:
    """Multiply each row by the kernel of its expert.

    Args:
      rows: (rows, k), in groups.
      parameters: kernel (experts, k, n), or a tuple of (experts, k, n_i) side by side; no bias.
      where: its `starts` say which rows an expert has.
      gemm: how to quantize, or None for a plain product in `dtype`.

    Returns:
      (rows, n) in `dtype`, and the amaxes of input and kernels f32[2] (None without `gemm`).
    """
    rows = rows.astype(dtype)
    check_kernels(parameters)
    if gemm is None:
        return plain_grouped_linear(rows, parameters, where, dtype), None
    static = _Static(dtype, widths_of(parameters))
    return _grouped_linear(static, *match_vma(rows, parameters), where.starts, gemm)


@dataclass(frozen=True)
class _Static:
    dtype: jax.typing.DTypeLike
    widths: tuple[int, ...]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_linear(static: _Static, rows: jax.Array, parameters: LinearParameters, starts: jax.Array, gemm: Fp8Gemm):
    return _run(static, rows, parameters, starts, gemm, keep=False)[0]


def _run(static: _Static, rows: jax.Array, parameters: LinearParameters, starts: jax.Array, gemm: Fp8Gemm, keep: bool):
    y, amaxes, kept = forward_experts(quantize_input(rows, gemm, keep), parameters, starts, gemm, static.dtype)
    return (y, amaxes), kept


def _forward(static: _Static, rows: jax.Array, parameters: LinearParameters, starts: jax.Array, gemm: Fp8Gemm):
    out, kept = _run(static, rows, parameters, starts, gemm, keep=True)
    return out, (kept, ParamInfo.from_arrays(rows), ParamInfo.from_arrays(parameters), starts, gemm)


def _backward(static: _Static, residuals: tuple, cotangents: tuple):
    kept, rows_like, parameters_like, starts, gemm = residuals
    dy, _ = quantize_gradient(cotangents[0], parameters_like, gemm)
    drows = backward_dgrad(dy, kept, starts, gemm, static.dtype)
    gradients = backward_wgrad(dy, kept, parameters_like, starts, gemm, static.widths)
    return rows_like.place(drows), gradients, None, kept.record(dy, gemm)


_grouped_linear.defvjp(_forward, _backward)


# ---- the passes, which ops/expert_mlp.py uses too --------------------------------------------------------------------


def cast_experts(parameters: LinearParameters, gemm: Fp8Gemm) -> Fp8Pair:
    """The kernels of all experts in FP8: rowwise (experts, k, n), and columnwise (experts, n, k), which lie side by
    side in memory.
    """
    kernels = as_tuple(parameters.kernel)
    experts, k, _ = kernels[0].shape
    matrices = tuple(map(as_one_matrix, kernels))
    pair = gemm.weight or cast_weight(matrices, partial(gemm.cast, KERNEL))
    if pair.rowwise.scale.ndim:
        _check_squares(gemm, k, widths_of(parameters), (*pair.rowwise.granularity, *pair.columnwise.granularity))
    return of_each_expert(pair, experts)


def of_each_expert(pair: Fp8Pair, experts: int) -> Fp8Pair:
    """The pair of one matrix (experts * k, n), by expert: (experts, k, n) and (experts, n, k)."""

    def of_each(array: Fp8Array, dim: int) -> Fp8Array:
        """A matrix whose `dim` runs over all experts, as one matrix for each."""

        def cut(x: jax.Array) -> jax.Array:
            return jnp.moveaxis(x.reshape(*x.shape[:dim], experts, -1, *x.shape[dim + 1 :]), dim, 0)

        if not array.scale.ndim:
            return Fp8Array(cut(array.values), array.scale)
        return Fp8Array(cut(array.values), cut(array.scale), (1, *array.granularity))

    return Fp8Pair(of_each(pair.rowwise, 0), of_each(pair.columnwise, 1), pair.amax)


def widths_of(parameters: LinearParameters) -> tuple[int, ...]:
    """Columns of each of the kernels side by side."""
    return tuple(kernel.shape[-1] for kernel in as_tuple(parameters.kernel))


def forward_experts(
    x: GemmInput, parameters: LinearParameters, starts: jax.Array, gemm: Fp8Gemm, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array, GemmResidual]:
    """fprop: y (rows, n); amaxes f32[2] of input and kernels; and what the backward needs."""
    weight = cast_experts(parameters, gemm)
    with jax.named_scope(f"{gemm.name}/fprop"):
        y = grouped_matmul(x.pair.rowwise, weight.columnwise, starts, dtype=dtype, side_by_side=True)
    amaxes = jnp.stack([x.pair.amax, weight.amax])
    x_cast = x.cast.again(x.pair.rowwise.scale)
    return y, amaxes, GemmResidual(x.pair.columnwise, x_cast, weight.rowwise, amaxes, x.health)


def backward_dgrad(
    dy: Fp8Pair, residual: GemmResidual, starts: jax.Array, gemm: Fp8Gemm, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """dgrad: dx (rows, k) in `dtype`."""
    with jax.named_scope(f"{gemm.name}/dgrad"):
        return grouped_matmul(dy.rowwise, residual.kernel, starts, dtype=dtype)


def backward_wgrad(
    dy: Fp8Pair,
    residual: GemmResidual,
    parameters_like: LinearParameters,
    starts: jax.Array,
    gemm: Fp8Gemm,
    widths: tuple[int, ...],
) -> LinearParameters:
    """wgrad: the gradient of each kernel (experts, k, n_i), by a GEMM of its own, in the dtype of the params; or None,
    where the record has a sum of such gradients, to which the GEMM adds.

    Rows of dyᵀ are cut, one byte an element, rather than columns of the gradients, four bytes.
    """
    assert residual.x_transposed is not None, "kept, or made again"
    sums, gradients = gemm.record.gradient, []
    for i, (like, end) in enumerate(zip(infos_of(parameters_like.kernel), accumulate(widths), strict=True)):
        with jax.named_scope(f"{gemm.name}/wgrad"):
            rows = _some_rows(dy.columnwise, end - widths[i], end)
            product = partial(grouped_weight_gradient, residual.x_transposed, rows, starts)
            gradients.append(_written(product, like) if sums is None else _added(product, sums.refs[i], sums.weight))
    dkernel: PyTree = tuple(gradients) if isinstance(parameters_like.kernel, tuple) else gradients[0]
    return LinearParameters(dkernel, None)


def _written(product: Callable[..., jax.Array], like: ParamInfo) -> jax.Array:
    dtype = like.dtype if like.dtype in RESULT_DTYPES else jnp.float32
    return like.place(product(dtype=dtype).astype(like.dtype))


def _added(product: Callable[..., jax.Array], ref: jax.Ref, weight: float) -> None:
    total = ref[...]
    ref[...] = ParamInfo.from_arrays(total).place(product(dtype=jnp.float32, c=total, alpha=weight))


def _some_rows(array: Fp8Array, first: int, end: int) -> Fp8Array:
    """Rows of a matrix; with scales by tile, whole tiles of rows."""
    if (first, end) == (0, array.shape[0]):
        return array
    values, length = lax.slice_in_dim(array.values, first, end), array.granularity[0]
    if not array.scale.ndim:
        return replace(array, values=values)
    return Fp8Array(values, lax.slice_in_dim(array.scale, first // length, -(-end // length)), array.granularity)


def plain_grouped_linear(
    rows: jax.Array, parameters: LinearParameters, where: ExpertRows, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """The product in `dtype`, without FP8, by XLA."""
    kernel = joined(parameters.kernel, dtype)

    def multiply(rows: jax.Array, kernel: jax.Array, starts: jax.Array) -> tuple[jax.Array]:
        sizes = jnp.diff(starts)
        return (lax.ragged_dot(rows, kernel, sizes),)

    with jax.named_scope(PLAIN_SCOPE):
        return on_own_tokens("r k, e k n, s -> r n", multiply, rows, kernel, where.starts)[0]


# ---- what must hold --------------------------------------------------------------------------------------------------


def check_kernels(parameters: LinearParameters) -> None:
    """Raise unless these are whole kernels of experts, without biases."""
    for kernel in as_tuple(parameters.kernel):
        if kernel.ndim != 3:
            raise ValueError(f"kernels of experts must be (experts, in, out), got {kernel.shape}; stack them")
        if any(explicit_spec(kernel)):
            raise ValueError(
                f"every device must have all experts, got a kernel {kernel.shape} that a mesh splits by "
                f"{explicit_spec(kernel)}; split only the batch"
            )
    if parameters.bias is not None:
        raise ValueError("experts have no bias, got one; leave it out")


def _check_squares(gemm: Fp8Gemm, k: int, widths: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    longest = max(lengths)
    if k % longest or any(width % longest for width in widths):
        raise ValueError(
            f"{gemm.layer}: kernels of experts with scales by tile need in and out features divisible by {longest}, "
            f"got {k} and {', '.join(map(str, widths))}; use other sizes, or a recipe with one scale a tensor"
        )

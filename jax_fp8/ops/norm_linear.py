"""norm → quantize → GEMM as one differentiable op.

Kept for the backward: `x` with its two statistics per row, and the FP8 residuals of the GEMM. The normalized
activations in bfloat16 are not kept; with `recompute` their FP8 values are not kept either.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jax_fp8.core.cast import Cast
from jax_fp8.core.checkpoint_names import name_residual
from jax_fp8.core.formats import INPUT
from jax_fp8.core.fp8_array import Fp8Pair
from jax_fp8.core.fp8_gemm import Fp8Gemm
from jax_fp8.core.shards import TensorParallel
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.amax import as_matrix
from jax_fp8.kernels.few_rows import FewRows
from jax_fp8.kernels.norm import NormParameters, NormStatistics, norm_amax, norm_backward, norm_quantize, normalize
from jax_fp8.kernels.quantize import Matrices
from jax_fp8.kernels.vma import match_vma
from jax_fp8.ops.collectives import gather_pair
from jax_fp8.ops.operands import GemmInput, few_rows, quantize_gradient
from jax_fp8.ops.parameters import LinearParameters, ParamInfo
from jax_fp8.ops.passes import backward_gemm, forward_gemm, keeping_products, plain_linear


def norm_linear(
    x: jax.Array,
    norm: NormParameters,
    parameters: LinearParameters,
    gemm: Fp8Gemm | None,
    epsilon: float = 1e-6,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    *,
    return_input: bool = False,
    recompute: bool = False,
    tensor: TensorParallel | None = None,
) -> tuple[PyTree, jax.Array | None]:
    """`linear(normalize(x))` for `x` (..., k).

    Args:
      return_input: return `x` too, for a residual branch. The norm's backward kernel then adds the gradient of that
        branch, which saves a pass over it.
      recompute: normalize and quantize again in the backward instead of keeping the normalized xᵀ in FP8.
      tensor: in a step on shards, the axis over which the columns of the kernel are split; see `linear`.

    Returns:
      (..., n) in `dtype`, or of kernels side by side a tuple; with `return_input` a pair of it and `x` in `dtype`; and
      the amaxes f32[2] (None without `gemm`).
    """
    x = x.astype(dtype)
    if gemm is None:

        def plain(x: jax.Array, norm: NormParameters, parameters: LinearParameters) -> Matrices:
            normalized, in_parts = normalize(x, norm, epsilon, dtype)[0], parameters.in_parts
            return plain_linear(normalized, parameters, dtype, in_parts, tensor=tensor, split_dim="columns")

        y = keeping_products(plain, recompute)(x, norm, parameters)
        return ((y, x) if return_input else y), None
    static = _Static(epsilon, dtype, return_input, recompute, parameters.widths, parameters.in_parts, tensor)
    out: PyTree = _norm_linear(static, *match_vma(as_matrix(x), norm, parameters), gemm)
    (y, rows), amaxes = out
    leading = x.shape[:-1] if tensor is None else tensor.all_rows(x.shape[:-1])
    y = jax.tree.map(lambda part: part.reshape(*leading, part.shape[-1]), y)
    return ((y, rows.reshape(x.shape)) if return_input else y), amaxes


def quantize_norm(
    x: jax.Array,
    norm: NormParameters,
    epsilon: float,
    gemm: Fp8Gemm,
    keep: bool,
    tensor: TensorParallel | None = None,
    forward_only: bool = False,
) -> tuple[GemmInput, NormStatistics | None]:
    """The normalized `x` (m, k) as the input of a GEMM, with the rows of all devices; with `keep` in both orientations.
    And the statistics that the norm's backward needs. With `forward_only`, norm and cast may be left to the GEMM.
    """
    measure = partial(norm_amax, x, norm, epsilon)
    cast = gemm.cast(INPUT, measure)
    if forward_only and tensor is None:
        if (found := few_rows(FewRows(x, cast, norm, epsilon), gemm, measure)) is not None:
            return found, None
    both = keep and not (tensor is not None and tensor.sequence)
    pair, statistics = norm_quantize(x, norm, epsilon, cast, orientations="both" if both else "rowwise")
    quantized = GemmInput.from_cast(lambda rows: normalize(rows, norm, epsilon, x.dtype)[0], (x,), pair, cast, gemm)
    return quantized.gathered(tensor, keep), statistics


def transpose_norm(
    norm: NormParameters, epsilon: float, tensor: TensorParallel | None, x: jax.Array, cast: Cast
) -> Fp8Pair:
    """The normalized `x` again, transposed in FP8, where `quantize_norm` did not keep it."""
    if tensor is None or not tensor.sequence:
        return norm_quantize(x, norm, epsilon, cast, orientations="columnwise")[0]
    return gather_pair(norm_quantize(x, norm, epsilon, cast, orientations="rowwise")[0], tensor)


@dataclass(frozen=True)
class _Static:
    epsilon: float
    dtype: jax.typing.DTypeLike
    return_input: bool
    recompute: bool
    widths: tuple[int, ...]
    in_parts: bool
    tensor: TensorParallel | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm_linear(static: _Static, x: jax.Array, norm: NormParameters, parameters: LinearParameters, gemm: Fp8Gemm):
    return _run(static, x, norm, parameters, gemm, keep=False, forward_only=True)[0]


def _run(
    static: _Static,
    x: jax.Array,
    norm: NormParameters,
    parameters: LinearParameters,
    gemm: Fp8Gemm,
    keep: bool,
    forward_only: bool = False,
):
    normalized, statistics = quantize_norm(x, norm, static.epsilon, gemm, keep, static.tensor, forward_only)
    y, amaxes, kept = forward_gemm(normalized, parameters, gemm, static.dtype, in_parts=static.in_parts)
    return ((y, x if static.return_input else None), amaxes), (statistics, kept)


def _forward(static: _Static, x: jax.Array, norm: NormParameters, parameters: LinearParameters, gemm: Fp8Gemm):
    keep = not (static.recompute or parameters.is_frozen)
    out, kept = _run(static, x, norm, parameters, gemm, keep)
    return out, (name_residual("norm_input", x), norm, *kept, ParamInfo.from_arrays(((x, norm), parameters)), gemm)


def _backward(static: _Static, residuals: tuple, cotangents: tuple):
    x, norm, statistics, kept, (likes, parameters_like), gemm = residuals
    (dy, dresidual), _ = cotangents
    kept = kept.with_input(partial(transpose_norm, norm, static.epsilon, static.tensor), x, after=dy)
    quantized, dbias = quantize_gradient(dy, parameters_like, gemm)
    dnormalized, gradients = backward_gemm(
        quantized, dbias, kept, parameters_like, gemm, static.dtype, static.widths, static.tensor
    )
    dx, dnorm = ParamInfo.place_all(likes, norm_backward(dnormalized, x, norm, statistics, dresidual))
    return dx, dnorm, gradients, kept.record(quantized, gemm)


_norm_linear.defvjp(_forward, _backward)

"""The passes of a GEMM, from operands that are quantized already: what every composite op is made of.

    fprop  y[m, n]  = x[m, k]  · w[n, k]ᵀ       x, w E4M3
    dgrad  dx[m, k] = dy[m, n] · kernel[k, n]ᵀ   dy  E5M2
    wgrad  dw[k, n] = xᵀ[k, m] · dyᵀ[n, m]ᵀ      as the params; sums of microbatches float32

Each tensor is contracted along both of its dims, so each is quantized once, in both orientations: the forward consumes
x and wᵀ, and keeps xᵀ and w for the backward, in FP8.

The kernel may be several, side by side: (k, n_i), each a parameter of its own, as queries, keys and values or gate and
up are. They are cast into one pair (k, n), and every tensor that another GEMM reads as a whole is one array. What goes
separate ways is made apart: the result by one fprop a kernel, where an op wants it in parts, and the gradients by one
wgrad a kernel, written where they belong. Nothing large is cut from an array or put together in one; the gradients of
the parts are cast side by side into one dy. Kernels so small that their gradients would leave most of a GPU idle share
a wgrad, and its result is cut.

None of this differentiates: an op owns one `custom_vjp` around its passes, and a quantized value never crosses its
boundary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.cast import Cast
from jax_fp8.core.checkpoint_names import name_residual
from jax_fp8.core.formats import INPUT, KERNEL
from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair
from jax_fp8.core.fp8_gemm import CAST_STATISTICS, OBSERVED, Fp8Gemm
from jax_fp8.core.shards import SplitDim, TensorParallel
from jax_fp8.kernels.amax import amax, as_matrix
from jax_fp8.kernels.explicit import like_columns, product, shards_of
from jax_fp8.kernels.gemm import RESULT_DTYPES, matmul
from jax_fp8.kernels.quantize import Matrices, as_tuple, quantize_transpose
from jax_fp8.ops.collectives import enter, leave, reduce_rows
from jax_fp8.ops.operands import GemmInput
from jax_fp8.ops.parameters import LinearParameters, ParamInfo, gradients_like, joined, split_columns

PLAIN_SCOPE = "jax_fp8_plain_linear"
# Elements of a kernel whose gradient is worth a GEMM of its own: as many as keep half of an H200 busy,
# in tiles of 128 x 256.
SMALLEST_WGRAD = 2**21
CAST_SCOPE = "cast_weights"  # every cast of a weight, but for those that the optimizer makes on its way


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GemmResidual:
    """What the backward of one GEMM keeps.

    Args:
      x_transposed: (k, m), or None where the backward makes it again.
      x_cast: how, to the same bits.
      kernel: (k, n).
      amaxes: f32[2], of input and kernel.
      x_health: f32[STATISTICS], or None where nobody asks.
    """

    x_transposed: Fp8Array | None
    x_cast: Cast
    kernel: Fp8Array
    amaxes: jax.Array
    x_health: jax.Array | None = None

    def record(self, dy: Fp8Pair, gemm: Fp8Gemm) -> Fp8Gemm | None:
        """Record what this backward pass knows of the GEMM's tensors, at its end; returns the cotangent of `gemm`."""
        gemm.record.measure(CAST_STATISTICS, self.x_health, OBSERVED.index(INPUT))
        return gemm.record_backward(jnp.append(self.amaxes, dy.amax))

    def with_input(
        self, requantize: Callable[[jax.Array, Cast], Fp8Pair], made_of: jax.Array, after: jax.Array
    ) -> "GemmResidual":
        """With xᵀ, if it was not kept: `requantize(made_of, cast)` gives it again, once `after` is there."""
        if self.x_transposed is not None:
            return self
        made_of, _ = lax.optimization_barrier((made_of, after))  # or it might be made early, and kept after all
        return replace(self, x_transposed=requantize(made_of, self.x_cast).columnwise)


def plain_linear(
    x: jax.Array,
    parameters: LinearParameters,
    dtype,
    in_parts: bool = False,
    *,
    residual: jax.Array | None = None,
    tensor: TensorParallel | None = None,
    split_dim: SplitDim | None = None,
) -> Any:
    """The product in `dtype`, without FP8; with `in_parts` a tuple, of each kernel's columns.

    `tensor` and `split_dim` as in `linear`; `x` has leading dims, whose flattened rows are gathered or scattered.
    """
    kernel, bias = (joined(side_by_side, dtype) for side_by_side in (parameters.kernel, parameters.bias))
    leading = x.shape[:-1]
    if tensor is not None and split_dim == "columns":
        leading = tensor.all_rows(leading)
        entered: Any = enter(as_matrix(x), tensor)
        x = entered.reshape(*leading, x.shape[-1])
    with jax.named_scope(PLAIN_SCOPE):
        y = product(x, kernel)
    if tensor is not None and split_dim == "rows":
        left: Any = leave(as_matrix(y), tensor)
        y = left.reshape(*tensor.own_rows(leading), -1)
    y = y if bias is None else y + lax.broadcast_to_rank(like_columns(bias, y), y.ndim)
    y = y if residual is None else y + residual.astype(dtype)
    return split_columns(y, parameters.widths) if in_parts else y


def keeping_products(function: Callable, recompute: bool) -> Callable:
    """A function without FP8 of arrays; with `recompute` its backward keeps what enters it and what its products and
    collectives return, and computes all else again.
    """
    return jax.checkpoint(function, policy=_is_product_or_collective) if recompute else function


def _is_product_or_collective(primitive, *_, **__) -> bool:
    kept = "dot_general", "ragged_dot", "psum", "all_gather", "reduce_scatter", "all_to_all"
    return primitive.name.startswith(kept)


def cast_weight(kernel: Matrices, cast_of: Callable[[Callable[[], jax.Array]], Cast]) -> Fp8Pair:
    """A kernel (k, n), or several side by side, in FP8, as `cast_of(measure)` says."""
    with jax.named_scope(CAST_SCOPE):
        return quantize_transpose(kernel, cast_of(partial(amax, *as_tuple(kernel))))


def forward_gemm(
    x: GemmInput,
    parameters: LinearParameters,
    gemm: Fp8Gemm,
    dtype,
    residual: jax.Array | None = None,
    in_parts: bool = False,
) -> tuple[Any, jax.Array, GemmResidual]:
    """fprop: y (m, n), with bias and residual (m, n) added, or `in_parts` a tuple of (m, n_i); amaxes f32[2] of input
    and kernel; and what the backward needs.
    """
    weight = gemm.weight or cast_weight(parameters.kernel, partial(gemm.cast, KERNEL))
    multiply = partial(
        matmul,
        x.pair.rowwise,
        weight.columnwise,
        bias=joined(parameters.bias, jnp.bfloat16 if dtype == jnp.float32 else dtype),  # as the GEMM takes it
        c=residual,
        c_in_place=False,  # the backward of a norm keeps the residual stream
        dtype=dtype,
        accumulation=gemm.accumulation("fprop"),
    )
    with jax.named_scope(f"{gemm.name}/fprop"):
        parts = _columns(ParamInfo.of(as_tuple(parameters.kernel)), parameters.widths)
        y = tuple(multiply(**columns) for columns in parts) if in_parts else multiply()
    amaxes = jnp.stack([x.pair.amax, weight.amax])
    transposed = x.pair.columnwise
    x_transposed = transposed and replace(transposed, values=name_residual("gemm_input", transposed.values))
    x_cast = x.cast.again(x.pair.rowwise.scale)
    return y, amaxes, GemmResidual(x_transposed, x_cast, weight.rowwise, amaxes, x.health)


def forward_rows(
    x: GemmInput,
    parameters: LinearParameters,
    gemm: Fp8Gemm,
    dtype,
    residual: jax.Array | None,
    tensor: TensorParallel | None,
) -> tuple[jax.Array, jax.Array, GemmResidual]:
    """`forward_gemm` by rows of the kernel: the sum over the devices, then bias and residual, added in float32.

    With one device the GEMM adds them itself.
    """
    if tensor is None:
        return forward_gemm(x, parameters, gemm, dtype, residual)
    sums, amaxes, kept = forward_gemm(x, replace(parameters, bias=None), gemm, dtype)
    y = reduce_rows(sums, tensor).astype(jnp.float32)
    y = y if parameters.bias is None else y + joined(parameters.bias, jnp.float32)
    y = y if residual is None else y + residual.astype(jnp.float32)
    return y.astype(dtype), amaxes, kept


def backward_gemm(
    dy: Fp8Pair,
    dbias: jax.Array | None,
    residual: GemmResidual,
    parameters_like: LinearParameters,
    gemm: Fp8Gemm,
    dtype,
    widths: tuple[int, ...],
    tensor: TensorParallel | None = None,
) -> tuple[jax.Array, LinearParameters]:
    """dgrad and wgrad: dx (m, k) in `dtype` and the gradients of kernel and bias.

    Args:
      dbias: f32[n], the column sums of dy; unused without a bias.
      widths: columns of each kernel.
      tensor: of a GEMM by columns: dx is a sum over the devices.

    Where the record collects the kernel's gradients, this one is added there, and None is returned for it.
    """
    dx = reduce_rows(backward_dgrad(dy, residual, gemm, dtype), tensor)
    gradients = backward_wgrad(dy, dbias, residual, parameters_like, gemm, widths)
    return (dx, gradients) if tensor is None else beside_wgrad(dx, gradients, gemm)


def beside_wgrad(dx: jax.Array, gradients: Any, *gemms: Fp8Gemm) -> tuple[jax.Array, Any]:
    """The same, there only when weight gradients are, too: so that dx is reduced over `tensor` beside them.

    XLA's scheduler takes a custom call to cost nothing, and would leave all weight gradients to the end.
    """
    refs = [ref for gemm in gemms if gemm.record.gradient for ref in gemm.record.gradient.refs]
    dx, gradients, totals = lax.optimization_barrier((dx, gradients, [ref[...] for ref in refs]))
    for ref, total in zip(refs, totals, strict=True):
        ref[...] = total
    return dx, gradients


def backward_dgrad(dy: Fp8Pair, residual: GemmResidual, gemm: Fp8Gemm, dtype) -> jax.Array:
    """The first half of `backward_gemm`, which does without xᵀ."""
    _check_rows(dy.rowwise.values, gemm)
    with jax.named_scope(f"{gemm.name}/dgrad"):
        return matmul(dy.rowwise, residual.kernel, dtype=dtype, accumulation=gemm.accumulation("dgrad"))


def backward_wgrad(
    dy: Fp8Pair,
    dbias: jax.Array | None,
    residual: GemmResidual,
    parameters_like: LinearParameters,
    gemm: Fp8Gemm,
    widths: tuple[int, ...],
) -> LinearParameters:
    """The second half of `backward_gemm`."""
    with jax.named_scope(f"{gemm.name}/wgrad"):
        dkernel = _kernel_gradients(residual, dy.columnwise, as_tuple(parameters_like.kernel), gemm, widths)
    bias_like = parameters_like.bias
    if not isinstance(parameters_like.kernel, tuple):
        dkernel = dkernel[0]
    if bias_like is None or dbias is None:
        return LinearParameters(dkernel, None)
    # Behind a barrier: the compiler would otherwise make the cut part of the optimizer's kernel,
    # wrapping the one into the other.
    dbiases = lax.optimization_barrier(split_columns(dbias, widths)) if len(widths) > 1 else (dbias,)
    return LinearParameters(dkernel, gradients_like(dbiases, bias_like))


def _columns(likes, widths) -> Iterator[dict[str, Any]]:
    """The columns of each kernel as `matmul` takes them: the first and their number, and what splits them."""
    for like, width, end in zip(likes, widths, accumulate(widths), strict=True):
        yield {"columns": (end - width, width), "columns_over": like.columns_over}


def share_wgrad(in_features: int, widths: tuple[int, ...]) -> bool:
    """Whether the gradients of kernels (k, n_i) side by side are made by one GEMM, whose result is cut.

    Each alone would leave most of the GPU idle. Such gradients are not added to a sum by their GEMM.
    """
    return len(widths) > 1 and in_features * min(widths) < SMALLEST_WGRAD


def _kernel_gradients(residual, dy_transposed, likes, gemm, widths) -> tuple[Any, ...]:
    """dw of each kernel, or None for those that were added to their sums, or are for later."""
    x_transposed, how = residual.x_transposed, gemm.accumulation("wgrad")
    sums, deferral = gemm.record.gradient, gemm.record.deferral
    if deferral is not None:
        deferral.keep(x_transposed, dy_transposed, gemm.record.slot, gemm.name, how)
        return (None,) * len(widths)
    if sums is None:
        return kernel_gradients(x_transposed, dy_transposed, likes, how, widths)
    columns = [{}] if len(widths) == 1 else list(_columns(likes, widths))
    for ref, of in zip(sums.refs, columns, strict=True):
        total = ref[...]
        added = matmul(
            x_transposed, dy_transposed, **of, accumulation=how, dtype=jnp.float32, c=total, alpha=sums.weight
        )
        ref[...] = ParamInfo.of(total).place(added)
    return (None,) * len(widths)


def kernel_gradients(
    x_transposed: Fp8Array, dy_transposed: Fp8Array, likes: Any, accumulation: str, widths: tuple[int, ...]
) -> tuple[jax.Array, ...]:
    """wgrad: dw (k, n_i) of each kernel, of xᵀ (k, m) and dyᵀ (n, m); `likes` are those of the kernels."""
    multiply = partial(matmul, x_transposed, dy_transposed, accumulation=accumulation)
    if share_wgrad(x_transposed.shape[0], widths):
        whole = multiply(dtype=likes[0].dtype if likes[0].dtype in RESULT_DTYPES else jnp.float32)
        pieces = zip(split_columns(whole, widths), likes, strict=True)
        return tuple(like.place(piece.astype(like.dtype)) for piece, like in pieces)
    columns = [{}] if len(widths) == 1 else list(_columns(likes, widths))
    return tuple(_written_as(like, partial(multiply, **of)) for of, like in zip(columns, likes, strict=True))


def _written_as(like, multiply) -> jax.Array:
    """A gradient, rounded by the GEMM itself where it can."""
    written = like.dtype if like.dtype in RESULT_DTYPES else jnp.float32
    return like.place(multiply(dtype=written).astype(like.dtype))


def _check_rows(dy, gemm):
    rows, shards = dy.shape[0], shards_of(dy, 0)
    if rows % (16 * shards):
        of_each = f" on each of {shards} devices" if shards > 1 else ""
        raise ValueError(
            f"{gemm.layer}: the weight gradient contracts over batch * sequence, "
            f"which must be a multiple of 16{of_each}, got {rows // shards}; "
            "change the batch or sequence size, pad, or use recipe=None"
        )

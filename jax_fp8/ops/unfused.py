"""A norm and an activation as ops of their own, where something besides one GEMM reads their result: an adapter.

Kept for the backward: the input alone, and two statistics per row of a norm. The composite ops (ops/norm_linear.py,
ops/norm_mlp.py) write no result in `dtype` at all, so they are faster where nothing else reads it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jax_fp8.core.types import PyTree
from jax_fp8.kernels.activation_functions import activate, activate_backward
from jax_fp8.kernels.amax import as_matrix
from jax_fp8.kernels.norm import NormParameters, norm_backward, normalize
from jax_fp8.kernels.vma import match_vma
from jax_fp8.ops.parameters import ParamInfo


def apply_norm(
    x: jax.Array, norm: NormParameters, epsilon: float, dtype: jax.typing.DTypeLike, *, return_input: bool = False
) -> PyTree:
    """Normalize `x` (..., n) to `dtype`. With `return_input` the result is a pair with `x`, for a residual branch: the
    norm's backward kernel then adds the gradient of that branch.
    """
    rows, norm = match_vma(as_matrix(x.astype(dtype)), norm)
    out: PyTree = _norm(_Norm(epsilon, return_input), rows, norm)
    y, rows = out
    y = y.reshape(x.shape)
    return (y, rows.reshape(x.shape)) if return_input else y


@dataclass(frozen=True)
class _Norm:
    epsilon: float
    return_input: bool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(static: _Norm, x: jax.Array, norm: NormParameters):
    return normalize(x, norm, static.epsilon, x.dtype)[0], x if static.return_input else None


def _norm_forward(static: _Norm, x: jax.Array, norm: NormParameters):
    y, statistics = normalize(x, norm, static.epsilon, x.dtype)
    return (y, x if static.return_input else None), (x, norm, statistics, ParamInfo.from_arrays((x, norm)))


def _norm_backward(static: _Norm, residuals: tuple, cotangents: tuple):
    x, norm, statistics, likes = residuals
    dy, dresidual = cotangents
    return ParamInfo.place_all(likes, norm_backward(dy, x, norm, statistics, dresidual))


_norm.defvjp(_norm_forward, _norm_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def apply_activation(x: jax.Array, activation: str) -> jax.Array:
    """`activate`: of `x` (..., n), or with a gated activation of (..., 2 n), gate first, in the dtype of `x`."""
    return activate(x, activation)


apply_activation.defvjp(
    lambda x, activation: (activate(x, activation), x),
    lambda activation, x, dy: (activate_backward(dy, x, activation),),
)


def norm_then(
    multiply: Callable[[jax.Array], PyTree],
    x: jax.Array,
    norm: NormParameters,
    epsilon: float,
    dtype: jax.typing.DTypeLike,
    return_input: bool,
) -> PyTree:
    """`multiply(normalize(x))`; with `return_input` a pair of that and `x`, as of `norm_linear`."""
    normalized: PyTree = apply_norm(x, norm, epsilon, dtype, return_input=return_input)
    if not return_input:
        return multiply(normalized)
    rows, x = normalized
    return multiply(rows), x


def mlp_by_parts(
    up: Callable[[jax.Array], PyTree],
    down: Callable[[jax.Array, jax.Array | None], jax.Array],
    x: jax.Array,
    norm: NormParameters | None,
    activation: str,
    epsilon: float,
    dtype: jax.typing.DTypeLike,
    residual: bool,
) -> jax.Array:
    """`down(activation(up(norm(x))), residual)`, as `norm_mlp` computes it in one op.

    Args:
      up: returns (..., n), or a tuple of gate and up.
      down: of the activated rows and `x`, which it adds; None without `residual`.
      norm: None leaves it out.
    """
    x = x.astype(dtype)
    if norm is None:
        hidden: PyTree = up(x)
    else:
        out: PyTree = norm_then(up, x, norm, epsilon, dtype, residual)
        hidden, x = out if residual else (out, x)
    hidden = jnp.concatenate(hidden, axis=-1) if isinstance(hidden, tuple) else hidden
    activated: PyTree = apply_activation(hidden, activation)
    return down(activated, x if residual else None)

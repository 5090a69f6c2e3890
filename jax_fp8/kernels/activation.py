"""Activations of a Transformer MLP, plain and gated, computed in float32, and the same followed by the cast to FP8.

A gated activation (https://arxiv.org/abs/2002.05202) takes (..., 2n), the gate in the first half, and returns `f(gate) * linear`, (..., n).

What follows an activation, and what its gradient goes into, is a GEMM in FP8. So one kernel reads the input and writes the FP8 values in the
orientations that are wanted, the amax and, of a gradient, the sums of its columns, the gradient of the bias; the activated tensor, rounded to
the dtype of `x` before it is quantized, exists in registers only.

    x, scale ─activate, round, quantize→ values, transposed, amax
    dy, x, scale, scale of y ─gradient of x, round, quantize→ values, transposed, amax, sums; y in FP8, transposed

The backward makes the transpose of y, which only the gradient of a weight wants, from the `x` that it reads anyway. So the forward writes one
orientation, and what lies between forward and backward is `x` alone.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.kernels.amax import amax_reference
from jax_fp8.kernels.dispatch import Split, dispatch, gathered, pmax, psum
from jax_fp8.kernels.quantize import (
    check_orientations,
    check_source_and_target,
    column_sums_reference,
    fp8_arrays,
    matrix_results,
    quantize_reference,
    sums_results,
    wanted,
)
from jax_fp8.kernels.scale_source import SCALAR, ScaleSource

TARGET = "jax_fp8_activation"


def gelu_tanh(x: jax.Array) -> jax.Array:
    """`x (1 + tanh(u)) / 2` with `u = sqrt(2 / pi) (x + 0.044715 x³)`, as in GPT-2 and Flax (https://arxiv.org/abs/1606.08415).

    Written as `x sigmoid(2u)`, which is the same function: on a GPU an exponential and a division cost less than XLA's float32 tanh.
    """
    return x * jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


PLAIN = {
    "gelu": gelu_tanh,
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
}
GATED = {"swiglu": PLAIN["silu"], "geglu": PLAIN["gelu"], "reglu": PLAIN["relu"]}


def is_gated(activation: str) -> bool:
    """Whether the activation halves its last dim; raises on an unknown name."""
    if activation not in PLAIN and activation not in GATED:
        raise ValueError(f"activation must be one of {(*PLAIN, *GATED)}, got {activation!r}")
    return activation in GATED


def activate(x: jax.Array, activation: str) -> jax.Array:
    """Apply an activation to (..., n), or a gated one to (..., 2n): (..., n) in the dtype of `x`."""
    if not is_gated(activation):
        return PLAIN[activation](x.astype(jnp.float32)).astype(x.dtype)
    gate, linear = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return (GATED[activation](gate) * linear).astype(x.dtype)


def activate_backward(dy: jax.Array, x: jax.Array, activation: str) -> jax.Array:
    """The gradient of `x`, recomputing the activation: nothing but its input is kept."""
    _, pullback = jax.vjp(partial(activate, activation=activation), x)
    return pullback(dy)[0]


def activation_quantize(
    x: jax.Array,
    activation: str,
    dtype: jax.typing.DTypeLike,
    scale: jax.Array | ScaleSource,
    *,
    orientations: str = "both",
) -> tuple[Fp8Array | None, Fp8Array | None, jax.Array]:
    """`quantize(activate(x))` without the tensor in between.

    Args:
      x: (m, n), or (m, 2n) for a gated activation; float32, bfloat16 or float16.
      activation: a name in PLAIN or GATED.
      dtype: E4M3 or E5M2.
      scale: f32[] or where it comes from.
      orientations: "both", "straight" or "transposed".

    Returns:
      The activated tensor in FP8 (m, n), its transpose (n, m), each None where it is not wanted, and its amax f32[].
    """
    check_orientations(orientations)
    source, gated = ScaleSource.of(scale), is_gated(activation)
    check_source_and_target(x.dtype, dtype)
    _check_input("activation_quantize", x, gated)
    settings = {"activation": activation, "dtype": dtype, "scale_rule": source.rule, "orientations": orientations}
    rule = f"{_dims(gated)}, {source.dims} -> {', '.join(wanted(orientations, 'm n', 'n m'))}, , "
    kernel, reference = partial(_kernel, **settings), partial(_reference, **settings)
    *matrices, amax, used = dispatch(rule, kernel, reference, _halves(x, gated), source.array)
    return *fp8_arrays(orientations, matrices, used), amax


def activation_amax(x: jax.Array, activation: str) -> jax.Array:
    """The amax f32[] that `activation_quantize` returns, for a scale that must be known before."""
    gated = is_gated(activation)
    _check_input("activation_amax", x, gated)
    kernel, reference = partial(_amax_kernel, activation), partial(_amax_reference, activation)
    return dispatch(f"{_dims(gated)} -> ", kernel, reference, _halves(x, gated))[0]


def activation_backward_quantize(
    dy: jax.Array,
    x: jax.Array,
    activation: str,
    dtype: jax.typing.DTypeLike,
    scale: jax.Array | ScaleSource,
    activated_dtype: jax.typing.DTypeLike,
    activated_scale: jax.Array,
) -> tuple[Fp8Array, Fp8Array, jax.Array, jax.Array, Fp8Array]:
    """`quantize(activate_backward(dy, x))` without the tensor in between, and `activate(x)` in FP8 once more.

    Args:
      dy: (m, n), like the activated tensor.
      x: (m, c), c being n, or 2n for a gated activation; of the dtype of `dy`: float32, bfloat16 or float16.
      activation: a name in PLAIN or GATED.
      dtype: E4M3 or E5M2, of the gradient.
      scale: f32[] or where it comes from, of the gradient.
      activated_dtype, activated_scale: those that `activation_quantize` cast the activated tensor with, E4M3 or E5M2, and f32[].

    Returns:
      The gradient of `x` in FP8 (m, c), its transpose (c, m), its amax f32[] and the sums of its columns f32[c]; and the transpose (n, m) that
      `activation_quantize` makes of `x`, to the same bits.
    """
    source, gated = ScaleSource.of(scale), is_gated(activation)
    check_source_and_target(x.dtype, dtype)
    check_source_and_target(x.dtype, activated_dtype)
    _check_input("activation_backward_quantize", x, gated)
    _check_gradient("activation_backward_quantize", dy, x, gated)
    activated_scale = jnp.asarray(activated_scale, jnp.float32)
    settings = {
        "activation": activation,
        "dtype": dtype,
        "scale_rule": source.rule,
        "activated_dtype": activated_dtype,
    }
    # The halves of a result, h, are those of x, g, unless these were split: nothing splits h.
    results = "m h n, h n m, n m, , , h n" if gated else "m n, n m, n m, , , n"
    rule = f"m n, {_dims(gated)}, {source.dims}, -> {results}"
    kernel, reference = partial(_backward_kernel, **settings), partial(_backward_reference, **settings)
    operands = dy, _halves(x, gated), source.array, activated_scale
    values, transposed, activated, amax, used, sums = dispatch(rule, kernel, reference, *operands)
    if gated:
        m, c = _spec(x)
        values, transposed = _reshape(values, x.shape, m, c), _reshape(transposed, x.shape[::-1], c, m)
        sums = _reshape(sums, x.shape[1:], c)
    return Fp8Array(values, used), Fp8Array(transposed, used), amax, sums, Fp8Array(activated, activated_scale)


def activation_backward_amax(dy: jax.Array, x: jax.Array, activation: str) -> jax.Array:
    """The amax f32[] that `activation_backward_quantize` returns, for a scale that must be known before."""
    gated = is_gated(activation)
    _check_input("activation_backward_amax", x, gated)
    _check_gradient("activation_backward_amax", dy, x, gated)
    kernel, reference = partial(_backward_amax_kernel, activation), partial(_backward_amax_reference, activation)
    return dispatch(f"m n, {_dims(gated)} -> ", kernel, reference, dy, _halves(x, gated))[0]


def _check_input(operation, x, gated):
    if x.ndim != 2 or (gated and x.shape[1] % 2):
        shape = "(m, 2n), gate and linear" if gated else "(m, n)"
        raise ValueError(f"{operation} needs x of shape {shape}, got {x.shape}; flatten the leading dims")
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"{operation} needs float32, bfloat16 or float16, got {x.dtype}; cast first")


def _check_gradient(operation, dy, x, gated):
    shape = (x.shape[0], x.shape[1] // (2 if gated else 1))
    if (dy.shape, dy.dtype) != (shape, x.dtype):
        raise ValueError(
            f"{operation} needs dy like the activated x, {x.dtype}{shape}, got {dy.dtype}{dy.shape}; reshape or cast it"
        )


# In dispatch rules a gated x is (m, 2, n), so that shards of its columns are the same columns of both halves.


def _dims(gated):
    return "m g n" if gated else "m n"


def _halves(x, gated):
    if not gated:
        return x
    m, n = _spec(x)
    return _reshape(x, (x.shape[0], 2, x.shape[1] // 2), m, None, n)


def _spec(x):
    """The Explicit mesh axes that split each dim."""
    return tuple(jax.typeof(x).sharding.spec) or (None,) * x.ndim


def _reshape(x, shape, *spec):
    """On an Explicit mesh, with these axes splitting the result: what splits gate and linear as one is not what splits each."""
    if not any((*spec, *_spec(x))):
        return x.reshape(shape)
    return jnp.reshape(x, shape, out_sharding=NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*spec)))


def _joined(x, split):  # (m, n) or (m, g, n) -> (m, c), gate and linear whole
    x = gathered(x, split, "", "g")
    return x.reshape(x.shape[0], 2 * x.shape[2]) if x.ndim == 3 else x


def _activated(x, activation, split):
    # What a kernel rounds to the dtype of x, the compiler must not keep in float32 for what follows.
    return lax.optimization_barrier(activate(_joined(x, split), activation))


def _gradient(dy, x, activation, split):
    return lax.optimization_barrier(activate_backward(dy, _joined(x, split), activation))


def _kernel(x, array, split: Split, activation, dtype, scale_rule, orientations):
    x = _joined(x, split)
    m, n = x.shape[0], x.shape[1] // (2 if is_gated(activation) else 1)
    results = (*matrix_results(orientations, (m, n), dtype), SCALAR, SCALAR)
    call = jax.ffi.ffi_call(f"{TARGET}_quantize", results)
    attributes = {"activation": activation, **scale_rule.attributes()}
    *matrices, amax, scale = call(x, gathered(array, split, "r"), **attributes)
    return *wanted(orientations, *matrices), pmax(amax, split, "m", "n"), scale


def _reference(x, array, split: Split, activation, dtype, scale_rule, orientations):
    y = _activated(x, activation, split)
    scale = scale_rule.scale(array, dtype, split)
    values = quantize_reference(y, dtype, scale)
    return *wanted(orientations, values, values.T), pmax(amax_reference(y), split, "m", "n"), scale


def _amax_kernel(activation, x, split: Split):
    result = jax.ffi.ffi_call(f"{TARGET}_amax", SCALAR)(_joined(x, split), activation=activation)
    return (pmax(result, split, "m", "n"),)


def _amax_reference(activation, x, split: Split):
    return (pmax(amax_reference(_activated(x, activation, split)), split, "m", "n"),)


def _backward_kernel(dy, x, array, activated_scale, split: Split, activation, dtype, scale_rule, activated_dtype):
    x = _joined(x, split)
    matrices = jax.ShapeDtypeStruct(x.shape, dtype), jax.ShapeDtypeStruct(x.shape[::-1], dtype)
    activated = jax.ShapeDtypeStruct(dy.shape[::-1], activated_dtype)
    results = (*matrices, activated, SCALAR, SCALAR, *sums_results(x.shape))
    call = jax.ffi.ffi_call(f"{TARGET}_backward_quantize", results)
    attributes = {"activation": activation, **scale_rule.attributes()}
    operands = dy, x, gathered(array, split, "r"), activated_scale
    values, transposed, activated, amax, scale, sums, _ = call(*operands, **attributes)
    return _backward_results(values, transposed, activated, amax, scale, sums, split, activation)


def _backward_reference(dy, x, array, activated_scale, split: Split, activation, dtype, scale_rule, activated_dtype):
    dx = _gradient(dy, x, activation, split)
    scale = scale_rule.scale(array, dtype, split)
    values, amax, sums = quantize_reference(dx, dtype, scale), amax_reference(dx), column_sums_reference(dx)
    activated = quantize_reference(_activated(x, activation, split), activated_dtype, activated_scale)
    return _backward_results(values, values.T, activated.T, amax, scale, sums, split, activation)


def _backward_results(values, transposed, activated, amax, scale, sums, split, activation):
    amax, sums = pmax(amax, split, "m", "n"), psum(sums, split, "m")
    if is_gated(activation):
        m, n = values.shape[0], values.shape[1] // 2
        values, transposed, sums = values.reshape(m, 2, n), transposed.reshape(2, n, m), sums.reshape(2, n)
    return values, transposed, activated, amax, scale, sums


def _backward_amax_kernel(activation, dy, x, split: Split):
    result = jax.ffi.ffi_call(f"{TARGET}_backward_amax", SCALAR)(dy, _joined(x, split), activation=activation)
    return (pmax(result, split, "m", "n"),)


def _backward_amax_reference(activation, dy, x, split: Split):
    return (pmax(amax_reference(_gradient(dy, x, activation, split)), split, "m", "n"),)

"""Activations (kernels/activation_functions.py) followed by the cast to FP8.

An FP8 GEMM follows an activation, and one follows its gradient. So one kernel reads the input and writes the FP8 values
in the wanted orientations and the amax, and for a gradient also the sums of its columns, the gradient of the bias. The
activated tensor is rounded to the dtype of `x` before the cast, and exists in registers only.

    x ─activate, round, cast→ a pair: values and their transpose, amax
    dy, x ─gradient of x, round, cast→ a pair, sums of columns; and y in FP8, columnwise

Only the weight gradient needs the transpose of y. The backward computes it from `x`, which it reads anyway. So the
forward writes one orientation, and only `x` is kept for the backward.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jax_fp8.core.cast import LINE, Cast
from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair
from jax_fp8.kernels.activation_functions import activate, activate_backward, is_gated
from jax_fp8.kernels.amax import amax_reference
from jax_fp8.kernels.casting import SCALAR, PairResults, attributes, check_cast, has_kernel, logical_scales, source_dims
from jax_fp8.kernels.dispatch import Split, dispatch, gathered, pmax, psum
from jax_fp8.kernels.explicit import Axes
from jax_fp8.kernels.quantize import column_sums_reference, sums_results

TARGET = "jax_fp8_activation"


def activation_quantize(
    x: jax.Array,
    activation: str,
    cast: Cast,
    row_weights: jax.Array | None = None,
    *,
    orientations: str = "both",
) -> Fp8Pair:
    """The cast of `activate(x)` without the tensor in between.

    Args:
      x: (m, n), or (m, 2n) for a gated activation; float32, bfloat16 or float16.
      activation: a name in PLAIN or GATED.
      cast: of the activated tensor.
      row_weights: f32[m], which multiply the rows of the activated tensor; None for ones.
      orientations: "both", "rowwise" or "columnwise".

    Returns:
      The activated tensor (m, n) in FP8.
    """
    gated, cast = is_gated(activation), check_cast(cast, x.dtype)
    _check_input("activation_quantize", x, gated, row_weights)
    results, weights = PairResults(cast.rule, orientations), _as_operands(row_weights)
    rule = f"{_dims(gated)}, {source_dims(cast)}{', m' * len(weights)} -> {results.dims('m n', 'n m')}"
    kernel = partial(_kernel, results, activation) if has_kernel(cast.rule) else None
    reference = partial(_reference, results, activation)
    return results.pair(dispatch(rule, kernel, reference, _halves(x, gated), cast.source, *weights))


def activation_amax(x: jax.Array, activation: str, row_weights: jax.Array | None = None) -> jax.Array:
    """The amax f32[] that `activation_quantize` returns, for a scale that must be known before."""
    gated = is_gated(activation)
    _check_input("activation_amax", x, gated, row_weights)
    kernel, reference = partial(_amax_kernel, activation), partial(_amax_reference, activation)
    weights = _as_operands(row_weights)
    return dispatch(f"{_dims(gated)}{', m' * len(weights)} -> ", kernel, reference, _halves(x, gated), *weights)[0]


def activation_backward_quantize(
    dy: jax.Array,
    x: jax.Array,
    activation: str,
    cast: Cast,
    activated_cast: Cast,
    row_weights: jax.Array | None = None,
) -> tuple[Fp8Pair, jax.Array, Fp8Array]:
    """The cast of `activate_backward(dy, x)` without the tensor in between, and `activate(x)` in FP8 once more.

    Args:
      dy: (m, n), like the activated tensor.
      x: (m, c), c being n, or 2n for a gated activation; of the dtype of `dy`: float32, bfloat16 or float16.
      activation: a name in PLAIN or GATED.
      cast: of the gradient.
      activated_cast: that of the activated tensor in the forward, with a scale that is known: see `Cast.again`.
      row_weights: those of the forward.

    Returns:
      The gradient of `x` (m, c) in FP8, and the sums of its columns f32[c]; and columnwise (n, m) what
      `activation_quantize` makes of `x`, to the same bits.
    """
    gated, cast = is_gated(activation), check_cast(cast, x.dtype)
    activated_cast = check_cast(activated_cast, x.dtype)
    _check_input("activation_backward_quantize", x, gated, row_weights)
    _check_gradient("activation_backward_quantize", dy, x, gated)
    _check_known(activated_cast)
    results, activated = PairResults(cast.rule), PairResults(activated_cast.rule, "columnwise")
    weights = _as_operands(row_weights)
    # h, the halves of a result, are the halves g of x. No mesh axis splits h.
    dims, sums = (("m h n", "h n m", "m c"), "h n") if gated else (("m n", "n m"), "n")
    rule = (
        f"m n, {_dims(gated)}, {source_dims(cast)}, {source_dims(activated_cast)}{', m' * len(weights)} -> "
        f"{results.dims(*dims)}, {sums}, {activated.dims('', 'n m')}"
    )
    kernel = partial(_backward_kernel, results, activated, activation) if _has_kernel(results, activated) else None
    operands = dy, _halves(x, gated), cast.source, activated_cast.source, *weights
    reference = partial(_backward_reference, results, activated, activation)
    found = dispatch(rule, kernel, reference, *operands)
    count = results.dims(*dims).count(",") + 1
    (values, values_t, *others), sums, again = found[:count], found[count], found[count + 1 :]
    if gated:
        m, c = _spec(x)
        values, values_t = _reshape(values, x.shape, m, c), _reshape(values_t, x.shape[::-1], c, m)
        sums = _reshape(sums, x.shape[1:], c)
    return results.pair([values, values_t, *others]), sums, activated.pair(again).columnwise


def activation_backward_amax(
    dy: jax.Array, x: jax.Array, activation: str, row_weights: jax.Array | None = None
) -> jax.Array:
    """The amax f32[] that `activation_backward_quantize` returns, for a scale that must be known before."""
    gated = is_gated(activation)
    _check_input("activation_backward_amax", x, gated, row_weights)
    _check_gradient("activation_backward_amax", dy, x, gated)
    kernel, reference = partial(_backward_amax_kernel, activation), partial(_backward_amax_reference, activation)
    weights = _as_operands(row_weights)
    return dispatch(
        f"m n, {_dims(gated)}{', m' * len(weights)} -> ", kernel, reference, dy, _halves(x, gated), *weights
    )[0]


def _as_operands(row_weights: jax.Array | None) -> tuple[jax.Array, ...]:
    """The last operands of every operation here: none, or the weights."""
    return () if row_weights is None else (row_weights,)


def _check_input(operation: str, x: jax.Array, gated: bool, row_weights: jax.Array | None):
    if x.ndim != 2 or (gated and x.shape[1] % 2):
        shape = "(m, 2n), gate and linear" if gated else "(m, n)"
        raise ValueError(f"{operation} needs x of shape {shape}, got {x.shape}; flatten the leading dims")
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"{operation} needs float32, bfloat16 or float16, got {x.dtype}; cast first")
    if row_weights is not None and (row_weights.shape, row_weights.dtype) != ((x.shape[0],), jnp.float32):
        raise ValueError(
            f"{operation} needs a weight of each row, float32{(x.shape[0],)}, got {row_weights.dtype}"
            f"{row_weights.shape}; reshape or cast them"
        )


def _check_gradient(operation: str, dy: jax.Array, x: jax.Array, gated: bool):
    shape = (x.shape[0], x.shape[1] // (2 if gated else 1))
    if (dy.shape, dy.dtype) != (shape, x.dtype):
        raise ValueError(
            f"{operation} needs dy like the activated x, {x.dtype}{shape}, got {dy.dtype}{dy.shape}; reshape or cast it"
        )


def _check_known(activated_cast: Cast):
    rule, source = activated_cast.rule, activated_cast.source
    if rule.tile is None and (rule.formula is not None or source.ndim):
        raise ValueError(
            "activation_backward_quantize needs the activated tensor's scale f32[], got a source of scales "
            f"{source.dtype}{source.shape} with formula {rule.formula}; pass `cast.again(scale)`"
        )


def _has_kernel(results: PairResults, activated: PairResults) -> bool:
    """Whether a kernel can write both results. By tile both must have one formula, and the activated tensor lines."""
    rule, again = results.rule, activated.rule
    if rule.tile is None and again.tile is None:
        return True
    return has_kernel(rule, again) and again.columnwise_tile == LINE and rule.formula == again.formula


# In dispatch rules a gated x is (m, 2, n), so that a shard of columns has the same columns of both halves.


def _dims(gated: bool):
    return "m g n" if gated else "m n"


def _halves(x: jax.Array, gated: bool):
    if not gated:
        return x
    m, n = _spec(x)
    return _reshape(x, (x.shape[0], 2, x.shape[1] // 2), m, None, n)


def _spec(x: jax.Array):
    """The Explicit mesh axes that split each dim."""
    return tuple(jax.typeof(x).sharding.spec) or (None,) * x.ndim


def _reshape(x: jax.Array, shape: tuple[int, ...], *spec: Axes):
    """Reshape, on an Explicit mesh with these axes for the result: gate and linear together are split otherwise than
    each alone.
    """
    if not any((*spec, *_spec(x))):
        return x.reshape(shape)
    return jnp.reshape(x, shape, out_sharding=NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*spec)))


def _joined(x: jax.Array, split: Split):  # (m, n) or (m, g, n) -> (m, c), gate and linear whole
    x = gathered(x, split, "", "g")
    return x.reshape(x.shape[0], 2 * x.shape[2]) if x.ndim == 3 else x


def _activated(x: jax.Array, activation: str, split: Split, *weights: jax.Array):
    # A kernel rounds to the dtype of x. The barrier keeps the compiler from passing on float32 instead.
    return lax.optimization_barrier(activate(_joined(x, split), activation, *weights))


def _gradient(dy: jax.Array, x: jax.Array, activation: str, split: Split, *weights: jax.Array):
    return lax.optimization_barrier(activate_backward(dy, _joined(x, split), activation, *weights))


def _kernel(results: PairResults, activation: str, x: jax.Array, source: jax.Array, *weights: jax.Array, split: Split):
    x = _joined(x, split)
    m, n = x.shape[0], x.shape[1] // (2 if is_gated(activation) else 1)
    call = jax.ffi.ffi_call(_target("quantize", results), results.shapes((m, n)))
    operands = results.operands(x, gathered(source, split, "r"))
    found = call(*operands, *weights, activation=activation, **attributes(results.rule))
    return results.from_kernel(found, split, "m", "n")


def _target(name: str, results: PairResults):
    return f"{TARGET}_{name}{'' if results.rule.tile is None else '_by_tile'}"


def _reference(
    results: PairResults, activation: str, x: jax.Array, source: jax.Array, *weights: jax.Array, split: Split
):
    return results.from_reference(_activated(x, activation, split, *weights), source, split, "m", "n")


def _amax_kernel(activation: str, x: jax.Array, *weights: jax.Array, split: Split):
    result = jax.ffi.ffi_call(f"{TARGET}_amax", SCALAR)(_joined(x, split), *weights, activation=activation)
    return (pmax(result, split, "m", "n"),)


def _amax_reference(activation: str, x: jax.Array, *weights: jax.Array, split: Split):
    return (pmax(amax_reference(_activated(x, activation, split, *weights)), split, "m", "n"),)


def _backward_kernel(
    results: PairResults,
    activated: PairResults,
    activation: str,
    dy: jax.Array,
    x: jax.Array,
    source: jax.Array,
    activated_source: jax.Array,
    *weights: jax.Array,
    split: Split,
):
    _check_halves(results, activation, split)
    x = _joined(x, split)
    values, values_t, amax, *scales = results.shapes(x.shape)
    _, again, _, *_, again_scales = activated.shapes(dy.shape)
    settings = {"activation": activation, **attributes(results.rule)}
    call = partial(jax.ffi.ffi_call, _target("backward_quantize", results))
    if results.rule.tile is None:
        shapes = values, values_t, again, amax, *scales, *sums_results(x.shape)
        operands = dy, x, gathered(source, split, "r"), activated_source, *weights
        values, values_t, again, amax, *scales, sums, _ = call(shapes)(*operands, **settings)
        again_scales = activated_source
    else:
        shapes = values, values_t, amax, *scales, again, again_scales, *sums_results(x.shape)
        values, values_t, amax, *scales, again, again_scales, sums, _ = call(shapes)(dy, x, *weights, **settings)
        again_scales = logical_scales(again_scales, LINE)
    pair = results.from_kernel((values, values_t, amax, *scales), split, "m", "n")
    # The kernel measures only the gradient: the amax of the activated tensor is known from the forward.
    return _backward_results(pair, sums, (again, jnp.zeros_like(amax), again_scales), split, activation)


def _backward_reference(
    results: PairResults,
    activated: PairResults,
    activation: str,
    dy: jax.Array,
    x: jax.Array,
    source: jax.Array,
    activated_source: jax.Array,
    *weights: jax.Array,
    split: Split,
):
    _check_halves(results, activation, split)
    dx = _gradient(dy, x, activation, split, *weights)
    pair = results.from_reference(dx, source, split, "m", "n")
    again = activated.from_reference(_activated(x, activation, split, *weights), activated_source, split, "m", "n")
    return _backward_results(pair, column_sums_reference(dx), again, split, activation)


def _check_halves(results: PairResults, activation: str, split: Split):
    """Raise for a gated gradient by tile with split columns: tiles run along both halves, of which it has parts."""
    if is_gated(activation) and results.rule.tile is not None and split.get("n"):
        raise ValueError(
            f"the gradient of {activation} cast by tile needs all columns on each device, got columns split over "
            f"{split['n']}; use another mesh, or a recipe with one scale a tensor"
        )


def _backward_results(
    pair: Sequence[jax.Array], sums: jax.Array, again: Sequence[jax.Array], split: Split, activation: str
):
    (values, values_t, *others), sums = pair, psum(sums, split, "m")
    if is_gated(activation):
        m, n = values.shape[0], values.shape[1] // 2
        values, values_t, sums = values.reshape(m, 2, n), values_t.reshape(2, n, m), sums.reshape(2, n)
    return values, values_t, *others, sums, *again


def _backward_amax_kernel(activation: str, dy: jax.Array, x: jax.Array, *weights: jax.Array, split: Split):
    call = jax.ffi.ffi_call(f"{TARGET}_backward_amax", SCALAR)
    result = call(dy, _joined(x, split), *weights, activation=activation)
    return (pmax(result, split, "m", "n"),)


def _backward_amax_reference(activation: str, dy: jax.Array, x: jax.Array, *weights: jax.Array, split: Split):
    return (pmax(amax_reference(_gradient(dy, x, activation, split, *weights)), split, "m", "n"),)

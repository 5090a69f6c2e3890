"""Norms against float64, forward and backward, plain and fused; the fused forward is norm and cast, bit for bit."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import plain
import pytest
import reference
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_close, assert_same_bits

from jax_fp8.core.cast import Cast
from jax_fp8.core.formats import E4M3, E5M2
from jax_fp8.core.scale import ScaleFormula
from jax_fp8.kernels.norm import (
    NormParameters,
    check_norm,
    norm_amax,
    norm_backward,
    norm_quantize,
    normalize,
    normalize_backward,
)
from jax_fp8.kernels.quantize import quantize_transpose

DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16]
SCALE = 0.0123
CAST = Cast.with_scale(E4M3, SCALE)
EPSILON = 1e-3  # large enough to matter to the numbers below
NORMALIZE, BACKWARD = jax.jit(normalize, static_argnums=(2, 3)), jax.jit(normalize_backward)
QUANTIZE = jax.jit(norm_quantize, static_argnums=2, static_argnames="orientations")


def array(seed, *shape, dtype=np.float32, mean=0.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) + mean).astype(dtype)


def parameters(norm, features=24, dtype=np.float32) -> NormParameters:
    """As they would be after some training: not ones and zeros."""
    bias = array(8, features, dtype=dtype) if norm == "layernorm" else None
    return NormParameters(array(7, features, dtype=dtype, mean=1.0), bias)


def expected(x, norm, dy):
    """y and the gradients of x and of the parameters, float64."""
    return plain.result_and_gradients(lambda x, norm: plain.normalize(x, norm, EPSILON), dy, x, norm)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((32, 24), np.float32), ((2, 5, 24), ml_dtypes.bfloat16), ((24,), np.float32)]
)
def test_forward_and_backward(norm, shape, dtype):
    x, dy, norm = array(0, *shape, dtype=dtype, mean=0.5), array(1, *shape, dtype=dtype), parameters(norm)
    kind = np.dtype(dtype).name
    y, (dx, dnorm) = expected(x, norm, dy)
    actual, statistics = NORMALIZE(x, norm, EPSILON, dtype)
    assert_close(actual, y, kind)
    actual_dx, actual_dnorm = BACKWARD(dy, x, norm, statistics)
    assert (actual.dtype, actual_dx.dtype) == (dtype, dtype)
    assert_close(actual_dx, dx, kind)
    assert_close(actual_dnorm.scale, dnorm.scale, "float32")
    if norm.bias is None:
        assert actual_dnorm.bias is None and statistics.mean is None
    else:
        assert_close(actual_dnorm.bias, dnorm.bias, "float32")
        assert_close(statistics.mean, np.mean(x.astype(np.float64), axis=-1, keepdims=True), "float32")
    assert statistics.rstd.shape == (*shape[:-1], 1) and statistics.rstd.dtype == jnp.float32


@pytest.mark.parametrize("wrong", ["other_norm", "epsilon", "scale"])
def test_another_norm_would_be_noticed(wrong):
    x, dy = array(0, 32, 24, mean=0.5), array(1, 32, 24)
    norm = parameters("layernorm")
    y, (dx, _) = expected(x, norm, dy)
    norm = {"other_norm": parameters("rmsnorm"), "scale": NormParameters(np.ones(24, np.float32), norm.bias)}.get(
        wrong, norm
    )
    actual, statistics = NORMALIZE(x, norm, 0.0 if wrong == "epsilon" else EPSILON, np.float32)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(actual, y, "float32")
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(BACKWARD(dy, x, norm, statistics)[0], dx, "float32")


def test_a_large_mean_is_subtracted_before_squaring():
    x = array(0, 4, 24, mean=1000.0)
    y, _ = expected(x, parameters("layernorm"), x)
    assert_close(NORMALIZE(x, parameters("layernorm"), EPSILON, np.float32)[0], y, "float16")  # x itself has 24 bits


def test_rounded_once():
    """bfloat16 in and out is float32 in between, to the bit."""
    x, norm = array(0, 32, 24, dtype=ml_dtypes.bfloat16), parameters("layernorm", dtype=ml_dtypes.bfloat16)
    in_float32, _ = normalize(
        jnp.asarray(x, jnp.float32), jax.tree.map(lambda leaf: leaf.astype(np.float32), norm), EPSILON, jnp.float32
    )
    assert_same_bits(normalize(jnp.asarray(x), norm, EPSILON, jnp.bfloat16)[0], in_float32.astype(jnp.bfloat16))


def test_gradients_have_the_dtypes_of_what_they_are_gradients_of():
    x, norm = jnp.asarray(array(0, 32, 24, dtype=ml_dtypes.bfloat16)), parameters("layernorm", dtype=ml_dtypes.bfloat16)
    _, statistics = NORMALIZE(x, norm, EPSILON, np.float32)
    gradients = BACKWARD(x, x, norm, statistics)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_check_norm_passes(norm):
    check_norm(norm)


@pytest.mark.parametrize("norm", ["LayerNorm", "batchnorm", None])
def test_check_norm_refuses(norm):
    with pytest.raises(ValueError, match=rf"norm must be one of \('layernorm', 'rmsnorm'\), got {norm!r}"):
        check_norm(norm)


# ---- fused with quantize ---------------------------------------------------------------------------------------------


def steps_apart(a, b) -> np.ndarray:
    """How many FP8 numbers lie between two arrays of them."""
    number = [np.asarray(x).view(np.uint8).astype(np.int32) for x in (a, b)]
    return np.abs(np.subtract(*(np.where(n < 128, n, 128 - n) for n in number)))


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
def test_quantized_as_float64_would_be(norm, dtype, fp8):
    """One element in a thousand may be rounded the other way, when float32 has it next to a tie."""
    x, norm = array(0, 64, 48, dtype=dtype, mean=0.5), parameters(norm, 48)
    pair, statistics = QUANTIZE(x, norm, EPSILON, Cast.with_scale(fp8, SCALE))
    y, _ = expected(x, norm, x)
    wanted, wanted_amax = reference.quantize(y.astype(dtype), fp8, SCALE)
    apart = steps_apart(pair.rowwise.values, wanted)
    assert apart.max() <= 1 and np.mean(apart == 0) > 0.999
    assert_same_bits(pair.columnwise.values, np.asarray(pair.rowwise.values).T)
    assert_close(pair.amax, wanted_amax, np.dtype(dtype).name)
    wide = x.astype(np.float64)
    variance = np.mean(wide**2, axis=-1) if norm.bias is None else np.var(wide, axis=-1)
    assert_close(statistics.rstd, 1 / np.sqrt(variance + EPSILON)[:, None], "float32")
    other, _ = expected(x, NormParameters(norm.scale, None if norm.bias is not None else norm.scale), x)
    apart = steps_apart(pair.rowwise.values, reference.quantize(other, fp8, SCALE)[0])
    assert np.mean(apart == 0) < 0.5  # the other norm


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transform", [pytest.param(lambda fn: fn, id="eager"), pytest.param(jax.jit, id="jit")])
def test_the_definition(norm, dtype, transform):
    """The operations one after the other: what is between them is rounded, under jit as well."""
    x, norm = jnp.asarray(array(0, 48, 64, dtype=dtype)), parameters(norm, 64)
    y, statistics = NORMALIZE(x, norm, EPSILON, dtype)
    cast = jax.jit(quantize_transpose)
    separate = cast(y, CAST), statistics
    fused = transform(lambda x: norm_quantize(x, norm, EPSILON, CAST))(x)
    jax.tree.map(assert_same_bits, fused, separate)
    assert_same_bits(transform(lambda x: norm_amax(x, norm, EPSILON))(x), separate[0].amax)
    if dtype != np.float32:
        unrounded, _ = NORMALIZE(x, norm, EPSILON, np.float32)
        assert steps_apart(cast(unrounded, CAST).rowwise.values, fused[0].rowwise.values).any()


@pytest.mark.parametrize("orientation", ["rowwise", "columnwise"])
@pytest.mark.parametrize("tile", [None, (1, 16)])
def test_one_orientation(tile, orientation):
    x, norm = jnp.asarray(array(0, 16, 32)), parameters("layernorm", 32)
    cast = Cast.by_tile(E5M2, tile, ScaleFormula()) if tile else Cast.with_scale(E5M2, SCALE)
    both, statistics = QUANTIZE(x, norm, EPSILON, cast)
    one, its_statistics = QUANTIZE(x, norm, EPSILON, cast, orientations=orientation)
    assert {name for name in ("rowwise", "columnwise") if getattr(one, name) is not None} == {orientation}
    jax.tree.map(assert_same_bits, getattr(one, orientation), getattr(both, orientation))
    jax.tree.map(assert_same_bits, (one.amax, its_statistics), (both.amax, statistics))


def test_current_scaling_and_an_empty_batch():
    x, norm = jnp.asarray(array(0, 16, 32)), parameters("rmsnorm", 32)
    pair, _ = norm_quantize(x, norm, EPSILON, Cast.from_amax(E4M3, norm_amax(x, norm, EPSILON), ScaleFormula()))
    assert_same_bits(pair.rowwise.scale, reference.current_scale(np.asarray(pair.amax), E4M3))
    assert np.max(np.abs(np.asarray(pair.rowwise.values, np.float32))) == 448
    pair, statistics = norm_quantize(x[:0], norm, EPSILON, CAST)
    shapes = pair.rowwise.shape, pair.columnwise.shape, statistics.rstd.shape
    assert (shapes, float(pair.amax)) == (((0, 32), (32, 0), (0, 1)), 0)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", [False, True])
def test_fused_backward(norm, dtype, with_residual):
    x, dy, residual = (jnp.asarray(array(seed, 32, 24, dtype=dtype, mean=0.5)) for seed in (0, 1, 2))
    norm, kind = parameters(norm, dtype=dtype), np.dtype(dtype).name
    _, (dx, dnorm) = expected(np.asarray(x), norm, np.asarray(dy))
    _, statistics = NORMALIZE(x, norm, EPSILON, dtype)
    given = residual if with_residual else None
    actual_dx, actual_dnorm = jax.jit(norm_backward)(dy, x, norm, statistics, given)
    wanted = dx + (np.asarray(residual, np.float64) if with_residual else 0)
    assert_close(actual_dx, wanted, kind)
    assert actual_dx.dtype == dtype and {leaf.dtype for leaf in jax.tree.leaves(actual_dnorm)} == {np.dtype(dtype)}
    jax.tree.map(lambda actual, wanted: assert_close(actual, wanted, kind), actual_dnorm, dnorm)
    separate = jax.jit(normalize_backward)(dy, x, norm, statistics, given)
    jax.tree.map(assert_same_bits, (actual_dx, actual_dnorm), separate)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(actual_dx, dx if with_residual else dx + np.asarray(residual, np.float64), kind)


def test_the_residual_is_added_before_the_one_rounding():
    x, dy, residual = (jnp.asarray(array(seed, 32, 24, dtype=ml_dtypes.bfloat16)) for seed in (0, 1, 2))
    norm = parameters("layernorm")
    _, statistics = normalize(x, norm, EPSILON, jnp.float32)
    once, _ = norm_backward(dy, x, norm, statistics, residual)
    twice = norm_backward(dy, x, norm, statistics)[0] + residual
    wide = norm_backward(*(a.astype(jnp.float32) for a in (dy, x)), norm, statistics, residual.astype(jnp.float32))[0]
    assert_same_bits(once, wide.astype(jnp.bfloat16))
    assert (np.asarray(once) != np.asarray(twice)).any()


SPECS = [P("data", None), P(None, "model"), P("data", "model"), P(("data", "model"), None), P(None, None)]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize(("spec", "norm"), [*((spec, "layernorm") for spec in SPECS), (SPECS[2], "rmsnorm")], ids=str)
def test_sharded(axis_type, spec, norm):
    """Rows stay where they are, features are gathered; the parameters' gradients are those of all rows."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    x, dy, residual = (array(seed, 32, 64, dtype=ml_dtypes.bfloat16, mean=0.5) for seed in (0, 1, 2))
    x[17, 40] = 50  # the amax, which one shard sees
    norm = parameters(norm, 64)

    def run(x, dy, residual, norm):
        quantized = norm_quantize(x, norm, EPSILON, CAST)
        gradients = norm_backward(dy, x, norm, quantized[1], residual)
        return quantized, norm_amax(x, norm, EPSILON), *gradients

    alone = jax.jit(run)(x, dy, residual, norm)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a in (x, dy, residual)]
        scale = jax.device_put(norm.scale, NamedSharding(mesh, P("model")))
        quantized, amax, dx, dnorm = jax.jit(run)(*placed, NormParameters(scale, norm.bias))
    jax.tree.map(assert_same_bits, (quantized, amax), alone[:2])
    assert_same_bits(dx, alone[2])
    jax.tree.map(lambda actual, wanted: assert_close(actual, wanted, "float32"), dnorm, alone[3])
    rows = NamedSharding(mesh, P(spec[0], None))
    if axis_type == AxisType.Explicit:
        assert quantized[0].rowwise.values.sharding.is_equivalent_to(rows, 2)
        assert dx.sharding.is_equivalent_to(rows, 2)


def test_vmap():
    x, norm = jnp.asarray(array(0, 3, 16, 32)), parameters("layernorm", 32)
    batched = jax.vmap(lambda x: norm_quantize(x, norm, EPSILON, CAST))(x)
    gradients = jax.vmap(lambda x, s: norm_backward(x, x, norm, s, x))(x, batched[1])
    for i in range(3):
        one = norm_quantize(x[i], norm, EPSILON, CAST)
        jax.tree.map(lambda a, b, i=i: assert_same_bits(a[i], b), batched, one)
        one = norm_backward(x[i], x[i], norm, one[1], x[i])
        jax.tree.map(lambda a, b, i=i: assert_close(a[i], b, "float32"), gradients, one)


def lowered(call, *args) -> dict[str, list[str]]:
    """The types of results and the attributes of each custom call."""
    text = jax.jit(call).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"custom_call @(jax_fp8_\w+)\((.*)\n?", text)
    return {name: [rest.split("->")[-1], rest] for name, rest in calls}


def test_what_the_kernels_are_told(with_kernels):
    x, norm = jnp.ones((32, 48), jnp.bfloat16), parameters("layernorm", 48)

    def run(x, scales):
        cast = Cast.with_row(E4M3, scales, 2)
        _, statistics = norm_quantize(x, norm, 0.25, cast, orientations="columnwise")
        return norm_amax(x, norm, 0.5), norm_backward(x, x, norm, statistics)

    calls = lowered(run, x, jnp.ones(3))
    assert set(calls) == {"jax_fp8_norm_quantize", "jax_fp8_norm_amax", "jax_fp8_norm_backward"}
    results, text = calls["jax_fp8_norm_quantize"]
    wanted = ["0x0xf8E4M3FN", "48x32xf8E4M3FN", "f32", "f32", "32x1xf32", "32x1xf32"]
    assert re.findall(r"tensor<(.*?)>", results) == wanted
    assert "epsilon = 2.500000e-01" in text and "row = 2" in text and "from_amax = false" in text
    assert "epsilon = 5.000000e-01" in calls["jax_fp8_norm_amax"][1]
    results, text = calls["jax_fp8_norm_backward"]
    assert re.findall(r"tensor<(.*?)>", results) == ["32x48xbf16", "48xf32", "48xf32", "1056x48xf32", "1056x48xf32"]
    calls = lowered(lambda x: norm_quantize(x, NormParameters(norm.scale, None), 0.25, CAST), x)
    results, _ = calls["jax_fp8_norm_quantize"]
    assert re.findall(r"tensor<(.*?)>", results)[4:] == ["0x0xf32", "32x1xf32"]


X, PARAMETERS = jnp.ones((16, 32)), parameters("layernorm", 32)
STATISTICS = NORMALIZE(X, PARAMETERS, EPSILON, np.float32)[1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: norm_quantize(X[0], PARAMETERS, 1e-5, CAST), r"norm_quantize needs a matrix .*\(32,\); flatten"),
        (lambda: norm_amax(X[:, :0], PARAMETERS, 1e-5), r"norm_amax needs a matrix with features, got shape \(16, 0\)"),
        (lambda: norm_quantize(X[:, 1:], PARAMETERS, 1e-5, CAST), r"a norm's scale of shape \(31,\), got \(32,\)"),
        (lambda: norm_quantize(X, PARAMETERS, 1e-5, Cast.with_scale(jnp.float16, 1)), "dtype must be E4M3 or E5M2"),
        (lambda: norm_quantize(X.astype(int), PARAMETERS, 1e-5, CAST), "float32, bfloat16 or float16, got int32; cast"),
        (
            lambda: norm_quantize(X, PARAMETERS, 1e-5, CAST, orientations="neither"),
            r"orientations must be one of \('both', 'rowwise', 'columnwise'\), got 'neither'",
        ),
        (lambda: norm_amax(X.astype(int), PARAMETERS, 1e-5), "needs float32, bfloat16 or float16, got int32"),
        (
            lambda: norm_backward(X.astype(jnp.bfloat16), X, PARAMETERS, STATISTICS),
            r"needs dy like x, float32\(16, 32\), got bfloat16\(16, 32\); cast",
        ),
        (
            lambda: norm_backward(X, X, PARAMETERS, STATISTICS, X[:8]),
            r"needs residual_gradient like x, .* got float32\(8",
        ),
        (
            lambda: norm_backward(X[:8], X[:8], PARAMETERS, STATISTICS),
            r"needs a mean per row, shape \(8, 1\), got \(16, 1\)",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()

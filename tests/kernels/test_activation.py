"""Activations and their gradients against float64; followed by the cast, against the separate operations too.

"Bit for bit" is of bfloat16: its rounding hides how a compiler fuses float32 arithmetic.
"""

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
from jax_fp8.kernels.activation import (
    activation_amax,
    activation_backward_amax,
    activation_backward_quantize,
    activation_quantize,
)
from jax_fp8.kernels.activation_functions import activate, activate_backward, is_gated
from jax_fp8.kernels.quantize import quantize_transpose_sums

ALL = [*plain.ACTIVATIONS, *plain.GATES]
SCALE = 0.07
CAST, ACTIVATED_CAST = Cast.with_scale(E4M3, SCALE), Cast.with_scale(E4M3, 0.05)
BY_TILE = Cast.by_tile(E5M2, (1, 16), ScaleFormula())
TRANSFORMS = [pytest.param(lambda fn: fn, id="eager"), pytest.param(jax.jit, id="jit")]


def array(seed, *shape, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape, scale=2).astype(dtype)


def expected(x, activation, dy):
    y, (dx,) = plain.result_and_gradients(lambda x: plain.activate(x, activation), dy, x)
    return y, dx


# ---- followed by the cast --------------------------------------------------------------------------------------------


def arguments(activation, shape=(48, 32), dtype=ml_dtypes.bfloat16, seed=0):
    """dy and x of an activated tensor of this shape."""
    rows, width = shape
    x = array(seed, rows, width * (2 if is_gated(activation) else 1), dtype=dtype)
    return jnp.asarray(array(seed + 1, rows, width, dtype=dtype)), jnp.asarray(x)


def fused(backward, activation, cast=CAST, activated_cast=ACTIVATED_CAST):
    """Of (dy, x): the pair and, of a gradient, the sums and the activated tensor."""
    if backward:
        return lambda dy, x: activation_backward_quantize(dy, x, activation, cast, activated_cast)
    return lambda dy, x: (activation_quantize(x, activation, cast),)


def separate(backward, activation, cast=CAST, activated_cast=ACTIVATED_CAST):
    if not backward:
        return lambda dy, x: cast_of(made(x, activation), cast)[:1]
    activated = separate(False, activation, activated_cast)
    return lambda dy, x: (*cast_of(made_backward(dy, x, activation), cast), activated(dy, x)[0].columnwise)


made, made_backward = jax.jit(activate, static_argnums=1), jax.jit(activate_backward, static_argnums=2)
cast_of = jax.jit(quantize_transpose_sums)


def assert_same_results(actual, expected):
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("activation", ALL)
def test_the_separate_operations_bit_for_bit(activation, backward, transform):
    args = arguments(activation)
    actual = transform(fused(backward, activation))(*args)
    assert_same_results(actual, separate(backward, activation)(*args))
    measured = activation_backward_amax(*args, activation) if backward else activation_amax(args[1], activation)
    assert_same_bits(measured, actual[0].amax)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("casts", [(BY_TILE, ACTIVATED_CAST), (CAST, BY_TILE), (BY_TILE, BY_TILE)])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_a_gradient_and_what_it_makes_beside_have_each_their_cast(activation, casts, transform):
    args = arguments(activation)
    pair, sums, activated = transform(fused(True, activation, *casts))(*args)
    assert_same_results((pair, sums, activated), separate(True, activation, *casts)(*args))
    width = args[1].shape[1] // 16
    assert pair.rowwise.scale.shape == ((48, width) if casts[0] is BY_TILE else ())
    assert activated.scale.shape == ((32, 3) if casts[1] is BY_TILE else ())


@pytest.mark.parametrize("casts", [(CAST, ACTIVATED_CAST), (BY_TILE, BY_TILE)], ids=["one scale", "by tile"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_weights_of_rows(activation, casts):
    """The bits of the separate operations, also of a gradient. Negative control: of other weights."""
    (dy, x), weights = arguments(activation), jnp.linspace(0.1, 2, 48, dtype=jnp.float32)

    @jax.jit
    def all_of(dy, x, weights):
        forward = activation_quantize(x, activation, casts[1], weights)
        backward = activation_backward_quantize(dy, x, activation, *casts, weights)
        amaxes = activation_amax(x, activation, weights), activation_backward_amax(dy, x, activation, weights)
        return forward, *backward, *amaxes

    def apart(weights):
        y = jax.jit(lambda x: activate(x, activation, weights))(x)
        dx = jax.jit(lambda dy, x: activate_backward(dy, x, activation, weights))(dy, x)
        forward, (backward, sums) = cast_of(y, casts[1])[0], cast_of(dx, casts[0])
        return forward, backward, sums, forward.columnwise, forward.amax, backward.amax

    found = all_of(dy, x, weights)
    assert_same_results(found, apart(weights))
    with pytest.raises(AssertionError):
        assert_same_results(found, apart(weights[::-1]))


def test_not_rounding_in_between_would_be_noticed():
    """Negative control: what a compiler does that takes the casts to bfloat16 and back for superfluous."""
    _, x = arguments("silu", (64, 64))
    exact = reference.quantize(plain.activate(np.asarray(x, np.float64), "silu"), E4M3, SCALE)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_same_bits(activation_quantize(x, "silu", CAST).rowwise.values, exact[0])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("activation", ALL)
def test_float64_rounded_the_same_way(activation, backward, dtype):
    """Nearly all values are those of float64; a float32 off in its last bits may fall to the other side of a tie."""
    dy, x = arguments(activation, (64, 64), dtype)
    y, dx = expected(np.asarray(x), activation, np.asarray(dy))
    made = (dx if backward else y).astype(np.float32).astype(dtype)
    fp8, wanted_amax = E5M2 if backward else E4M3, reference.amax(made)
    scale = reference.scale_from_amax(wanted_amax, fp8)
    pair, *beside = jax.jit(fused(backward, activation, Cast.with_scale(fp8, scale)))(dy, x)
    values, _ = reference.quantize(made, fp8, scale)
    assert pair.rowwise.dtype == pair.columnwise.dtype == fp8
    assert np.mean(np.asarray(pair.rowwise.values) == values) > 0.995
    assert_close(pair.rowwise.dequantize(), made, np.dtype(fp8).name)
    assert_same_bits(pair.columnwise.values, np.asarray(pair.rowwise.values).T)
    np.testing.assert_allclose(pair.amax, wanted_amax, rtol=1e-5 if dtype == np.float32 else 2.0**-8)
    if backward:
        sums, activated = beside
        assert_close(sums, made.astype(np.float64).sum(axis=0), "float16")
        with pytest.raises(AssertionError, match="relative error"):  # a row left out
            assert_close(sums, made.astype(np.float64)[1:].sum(axis=0), "float16")
        values, _ = reference.quantize(y.astype(np.float32).astype(dtype), E4M3, 0.05)
        assert np.mean(np.asarray(activated.values) == values.T) > 0.995


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_orientations(transform, activation):
    _, x = arguments(activation)

    def quantize(orientations):
        return transform(lambda x: activation_quantize(x, activation, CAST, orientations=orientations))(x)

    both = quantize("both")
    rowwise, columnwise = quantize("rowwise"), quantize("columnwise")
    assert rowwise.columnwise is None and columnwise.rowwise is None
    assert_same_results((rowwise.rowwise, rowwise.amax), (both.rowwise, both.amax))
    assert_same_results((columnwise.columnwise, columnwise.amax), (both.columnwise, both.amax))


@pytest.mark.parametrize("activation", ["gelu", "reglu"])
def test_sources_of_the_scale(activation):
    dy, x = arguments(activation)
    row = Cast.with_row(E4M3, jnp.float32([1, SCALE, 3]), 1)
    for backward, amax in (
        (False, activation_amax(x, activation)),
        (True, activation_backward_amax(dy, x, activation)),
    ):
        given = jax.jit(fused(backward, activation))(dy, x)
        assert_same_results(jax.jit(fused(backward, activation, row))(dy, x), given)
        current, *_ = jax.jit(fused(backward, activation, Cast.from_amax(E4M3, amax, ScaleFormula())))(dy, x)
        assert_same_bits(current.rowwise.scale, reference.current_scale(amax, E4M3))
        assert np.max(np.abs(np.asarray(current.columnwise.values, np.float32))) == 448
        assert_same_bits(current.amax, given[0].amax)


@pytest.mark.parametrize("shape", [(0, 16), (16, 0)])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_nothing(activation, shape):
    dy, x = arguments(activation, shape)
    pair, sums, activated = jax.jit(fused(True, activation))(dy, x)
    shapes = pair.rowwise.shape, pair.columnwise.shape, activated.shape
    assert shapes == (x.shape, x.shape[::-1], shape[::-1])
    assert_same_bits(pair.amax, np.float32(0))
    assert_same_bits(sums, np.zeros(x.shape[1], np.float32))
    assert_same_bits(jax.jit(fused(False, activation))(dy, x)[0].rowwise.scale, np.float32(SCALE))


def integers(seed, activation):
    """From -3 to 3: sums of what a ReLU makes of them are exact in any order."""
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(-3, 4, array.shape).astype(array.dtype) for array in arguments(activation))


@pytest.mark.parametrize("activation", ["squared_relu", "reglu"])
def test_vmap(activation):
    pairs = [integers(seed, activation) for seed in range(3)]
    mapped = jax.jit(jax.vmap(fused(True, activation)))(*(jnp.stack(args) for args in zip(*pairs, strict=True)))
    for i, args in enumerate(pairs):
        assert_same_results(jax.tree.map(lambda leaf, i=i: leaf[i], mapped), separate(True, activation)(*args))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("spec", [P("data"), P(None, "model"), P("data", "model")], ids=str)
@pytest.mark.parametrize("activation", ["squared_relu", "reglu"])
def test_sharded(activation, spec, axis_type):
    """Where shards split gate and linear as one matrix, each is put together; sums and amax are of all shards."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    dy, x = integers(0, activation)
    x[-1, 0], x[-1, -1], dy[-1, 0], dy[-1, -1] = 5, 7, 9, 11  # the amax is in one shard's hands
    wanted = [separate(backward, activation)(dy, x) for backward in (False, True)]
    with jax.set_mesh(mesh):
        args = [jax.device_put(array, NamedSharding(mesh, spec)) for array in (dy, x)]
        for backward, expected_results in zip((False, True), wanted, strict=True):
            pair, *beside = jax.jit(fused(backward, activation))(*args)
            assert_same_results((pair, *beside), expected_results)
            if axis_type == AxisType.Explicit:
                rows, cols = (*spec, None)[:2]
                assert pair.rowwise.values.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
                for transpose in (pair.columnwise, *beside[1:]):
                    assert transpose.values.sharding.is_equivalent_to(NamedSharding(mesh, P(cols, rows)), 2)
        assert_same_bits(jax.jit(lambda x: activation_amax(x, activation))(args[1]), wanted[0][0].amax)
        assert_same_bits(jax.jit(lambda dy, x: activation_backward_amax(dy, x, activation))(*args), wanted[1][0].amax)


def test_what_the_kernels_are_told(with_kernels):
    dy, x = arguments("swiglu")

    def everything(dy, x):
        one_way = activation_quantize(x, "swiglu", CAST, orientations="columnwise")
        amaxes = activation_amax(x, "swiglu"), activation_backward_amax(dy, x, "swiglu")
        return one_way, fused(True, "swiglu")(dy, x), amaxes

    lowered = jax.jit(everything).trace(dy, x).lower(lowering_platforms=("cuda",)).as_text()
    calls = dict(re.findall(r"@jax_fp8_activation_(\w+)\(.*?(mhlo.backend_config = .*)", lowered))
    assert set(calls) == {"quantize", "amax", "backward_quantize", "backward_amax"}
    for call in calls.values():
        assert 'activation = "swiglu"' in call
    types = {name: call.rpartition("->")[2] for name, call in calls.items()}
    assert "tensor<0x0xf8E4M3FN>, tensor<32x48xf8E4M3FN>, tensor<f32>, tensor<f32>" in types["quantize"]
    assert "tensor<48x64xf8E4M3FN>, tensor<64x48xf8E4M3FN>, tensor<32x48xf8E4M3FN>" in types["backward_quantize"]
    assert "tensor<64xf32>, tensor<1x64xf32>" in types["backward_quantize"]


X = jnp.ones((4, 6), jnp.bfloat16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: activation_quantize(X, "tanh", CAST), "activation must be one of .* got 'tanh'"),
        (lambda: activation_quantize(X, "gelu", CAST, orientations="x"), "orientations must be one of .*, got 'x'"),
        (lambda: activation_quantize(X, "gelu", Cast.with_scale(jnp.float16, 1)), "dtype must be E4M3 or E5M2"),
        (lambda: activation_quantize(X[0], "gelu", CAST), r"needs x of shape \(m, n\), got \(6,\); flatten"),
        (
            lambda: activation_quantize(X, "gelu", CAST, jnp.ones(3)),
            r"activation_quantize needs a weight of each row, float32\(4,\), got float32\(3,\); reshape or cast them",
        ),
        (lambda: activation_quantize(X[:, 1:], "reglu", CAST), r"of shape \(m, 2n\), gate and linear, got \(4, 5\)"),
        (lambda: activation_amax(X.astype(jnp.int8), "gelu"), "needs float32, bfloat16 or float16, got int8; cast"),
        (
            lambda: activation_backward_amax(X, X, "reglu"),
            r"dy like the activated x, bfloat16\(4, 3\), got bfloat16\(4, 6\)",
        ),
        (
            lambda: activation_backward_quantize(X.astype(jnp.float32), X, "gelu", CAST, CAST),
            r"activation_backward_quantize needs dy like .* bfloat16\(4, 6\), got float32\(4, 6\); reshape or cast it",
        ),
        (
            lambda: activation_backward_quantize(X, X, "gelu", CAST, Cast.with_scale(jnp.bfloat16, 1)),
            "dtype must be E4M3 or E5M2",
        ),
        (
            lambda: activation_backward_quantize(X, X, "gelu", CAST, Cast.with_row(E4M3, jnp.ones(3), 1)),
            r"needs the activated tensor's scale f32\[\], got .* float32\(3,\) .*; pass `cast.again\(scale\)`",
        ),
        (
            lambda: activation_backward_quantize(X, X, "gelu", CAST, Cast.from_amax(E4M3, 1, ScaleFormula())),
            r"needs the activated tensor's scale f32\[\], got .* with formula ScaleFormula\(margin=0",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()

"""`norm_mlp` is norm, linear, activation and linear, to the bit; close to the MLP without FP8;
and keeps FP8 where it can.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import plain
import pytest
import reference
from reference import assert_close, assert_same_bits

from jax_fp8.core.cast import Cast
from jax_fp8.core.formats import E4M3
from jax_fp8.core.fp8_gemm import Fp8Gemm, Record
from jax_fp8.core.recipe import CurrentScaling, DelayedScaling
from jax_fp8.kernels.activation_functions import activate, activate_backward, is_gated
from jax_fp8.kernels.norm import NormParameters, norm_backward, norm_quantize, normalize
from jax_fp8.ops.linear import linear
from jax_fp8.ops.norm_mlp import norm_mlp
from jax_fp8.ops.parameters import LinearParameters

BATCH, SEQUENCE, K, HIDDEN = 2, 24, 32, 64
EPSILON = 1e-2
SCALINGS = tuple(Fp8Gemm(CurrentScaling(), name) for name in ("up", "down"))
CASES = [("layernorm", "gelu"), ("rmsnorm", "swiglu")]


def array(seed, *shape, dtype=np.float32, mean=0.0) -> jax.Array:
    return jnp.asarray((np.random.default_rng(seed).normal(size=shape) + mean).astype(dtype))


X = array(0, BATCH, SEQUENCE, K, dtype=ml_dtypes.bfloat16, mean=0.3)
DY = array(1, BATCH, SEQUENCE, K, dtype=ml_dtypes.bfloat16)
DOWN = LinearParameters(array(6, HIDDEN, K) * 0.1, array(7, K))


def make_parameters(norm, activation):
    """The norm's, and those of the GEMM up, which is twice as wide for a gated activation."""
    width = 2 * HIDDEN if is_gated(activation) else HIDDEN
    return NormParameters(array(2, K, mean=1.0), array(3, K) if norm == "layernorm" else None), LinearParameters(
        array(4, K, width) * 0.2, array(5, width)
    )


def run(norm, up, activation, scalings=SCALINGS, x=X, dy=DY, dtype=jnp.bfloat16, **options):
    """y, the amaxes of both GEMMs, and the gradients of x, the norm's parameters, and both GEMMs'."""

    def mlp(x, norm, up, down):
        return norm_mlp(x, norm, up, down, scalings, activation, EPSILON, dtype, **options)

    (y, amaxes), pullback = jax.vjp(mlp, x, norm, up, DOWN)
    return y, amaxes, *pullback((dy.astype(dtype), jax.tree.map(jnp.zeros_like, amaxes)))


def expected(norm, up, activation, residual=False):
    def mlp(x, norm, up, down):
        y = plain.linear(plain.activate(plain.linear(plain.normalize(x, norm, EPSILON), up), activation), down)
        return x + y if residual else y

    return plain.result_and_gradients(mlp, DY, X, norm, up, DOWN)


def parts(norm, up, activation, scalings):
    """The same from the separate operations."""
    rows = X.reshape(-1, K)
    normalized, _ = normalize(rows, norm, EPSILON, jnp.bfloat16)
    *_, statistics = norm_quantize(
        rows, norm, EPSILON, Cast.with_scale(E4M3, 1.0)
    )  # the compiler's to the last bit, as the op's are
    (hidden, up_amaxes), up_pullback = jax.vjp(lambda x, up: linear(x, up, scalings[0]), normalized, up)
    (y, down_amaxes), down_pullback = jax.vjp(
        lambda x, down: linear(x, down, scalings[1]), activate(hidden, activation), DOWN
    )
    dactivated, ddown = down_pullback((DY.reshape(-1, K), jnp.zeros(2)))
    dnormalized, dup = up_pullback((activate_backward(dactivated, hidden, activation), jnp.zeros(2)))
    dx, dnorm = norm_backward(dnormalized, rows, norm, statistics)
    return y.reshape(X.shape), (up_amaxes, down_amaxes), dx.reshape(X.shape), dnorm, dup, ddown


@pytest.mark.parametrize(("norm", "activation"), CASES)
def test_is_its_parts_to_the_bit(norm, activation):
    norm, up = make_parameters(norm, activation)
    jax.tree.map(assert_same_bits, run(norm, up, activation), parts(norm, up, activation, SCALINGS))
    with pytest.raises(AssertionError):
        jax.tree.map(
            assert_same_bits,
            run(norm, up, activation),
            parts(norm, up, "geglu" if is_gated(activation) else "silu", SCALINGS),
        )


def test_each_gemm_has_a_scaling_of_its_own():
    norm, up = make_parameters("layernorm", "gelu")
    refs = jax.new_ref(jnp.zeros(3)), jax.new_ref(jnp.zeros(3))
    scale = {"up": [0.01, 0.002, 1e-4], "down": [0.02, 0.001, 1e-3]}
    scalings = tuple(
        Fp8Gemm(DelayedScaling(), name, jnp.float32(scale[name]), Record(ref))
        for name, ref in zip(scale, refs, strict=True)
    )
    actual = run(norm, up, "gelu", scalings)
    recorded = [np.asarray(ref[...]) for ref in refs]
    jax.tree.map(assert_same_bits, actual, parts(norm, up, "gelu", scalings))
    for amaxes, record in zip(actual[1], recorded, strict=True):
        assert_same_bits(amaxes, record[:2])
    assert_same_bits(recorded[1][2], reference.amax(DY))
    assert len(set(np.concatenate(recorded))) == 6
    with pytest.raises(AssertionError):
        jax.tree.map(assert_same_bits, actual, parts(norm, up, "gelu", scalings[::-1]))


@pytest.mark.parametrize(("norm", "activation"), CASES)
def test_against_float64(norm, activation):
    norm, up = make_parameters(norm, activation)
    y, _, *gradients = run(norm, up, activation)
    expected_y, expected_gradients = expected(norm, up, activation)
    assert_close(y, expected_y, "block")
    for actual, of in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        assert_close(actual, of, "block_gradient")


def test_a_wrong_activation_would_be_noticed():
    norm, up = make_parameters("layernorm", "gelu")
    y, _, dx, *_ = run(norm, up, "gelu")
    expected_y, (expected_dx, *_) = expected(norm, up, "squared_relu")
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(y, expected_y, "block")
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(dx, expected_dx, "block_gradient")


@pytest.mark.parametrize(("norm", "activation"), CASES)
@pytest.mark.parametrize("residual", [False, True])
def test_without_scalings_it_is_plain(norm, activation, residual):
    norm, up = make_parameters(norm, activation)
    x = X.astype(jnp.float32)
    y, amaxes, *gradients = run(norm, up, activation, None, x, dtype=jnp.float32, residual=residual)
    expected_y, expected_gradients = expected(norm, up, activation, residual)
    assert amaxes is None
    assert_close(y, expected_y, "float32")
    for actual, of in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        assert_close(actual, of, "float32")


def test_the_forward_alone_is_the_same():
    norm, up = make_parameters("layernorm", "gelu")
    forward = norm_mlp(X, norm, up, DOWN, SCALINGS, "gelu", EPSILON)
    jax.tree.map(assert_same_bits, forward, run(norm, up, "gelu")[:2])


def test_the_backward_keeps_neither_the_normalized_nor_the_activated_tensor():
    norm, up = make_parameters("rmsnorm", "swiglu")
    pullback = jax.eval_shape(
        lambda *args: jax.vjp(lambda *args: norm_mlp(*args, SCALINGS, "swiglu"), *args)[1], X, norm, up, DOWN
    )
    kept = jax.tree.leaves(pullback)
    hidden = BATCH * SEQUENCE * 2 * HIDDEN  # the input of the activation
    assert sorted(leaf.size for leaf in kept if leaf.dtype == jnp.bfloat16) == [X.size, hidden]
    rows = BATCH * SEQUENCE
    assert sorted(leaf.shape for leaf in kept if leaf.dtype == E4M3) == sorted(
        [(K, rows), (K, 2 * HIDDEN), (HIDDEN, K)]
    )
    assert max(leaf.size for leaf in kept if leaf.dtype == jnp.float32) == rows


@pytest.mark.parametrize(("norm", "activation"), CASES)
def test_recomputing_gives_the_same_bits_and_keeps_only_the_kernels_in_fp8(norm, activation):
    norm, up = make_parameters(norm, activation)
    jax.tree.map(assert_same_bits, run(norm, up, activation, recompute=True), run(norm, up, activation))
    pullback = jax.eval_shape(
        lambda *args: jax.vjp(lambda *args: norm_mlp(*args, SCALINGS, activation, recompute=True), *args)[1],
        X,
        norm,
        up,
        DOWN,
    )
    kept = sorted(leaf.shape for leaf in jax.tree.leaves(pullback) if leaf.dtype == E4M3)
    assert kept == sorted([up.kernel.shape, DOWN.kernel.shape])


@pytest.mark.parametrize(("norm", "activation"), CASES)
def test_the_residual_is_added_and_so_is_its_gradient(norm, activation):
    norm, up = make_parameters(norm, activation)
    y, amaxes, dx, *gradients = run(norm, up, activation, residual=True)
    without_y, without_amaxes, without_dx, *without_gradients = run(norm, up, activation)
    jax.tree.map(assert_same_bits, (amaxes, gradients), (without_amaxes, without_gradients))
    for actual, without, added in ((y, without_y, X), (dx, without_dx, DY)):
        assert_close(actual, without.astype(jnp.float32) + added.astype(jnp.float32), "bfloat16")
        with pytest.raises(AssertionError, match="relative error"):
            assert_close(actual, without, "bfloat16")


def test_errors():
    norm, up = make_parameters("layernorm", "gelu")
    with pytest.raises(ValueError, match=r"down: the weight gradient contracts over .* multiple of 16, got 20"):
        jax.eval_shape(lambda: run(norm, up, "gelu", x=X[:, :10], dy=DY[:, :10]))
    for scalings in (SCALINGS, None):
        with pytest.raises(ValueError, match=r"activation must be one of .*, got 'tanh'"):
            jax.eval_shape(lambda scalings=scalings: norm_mlp(X, norm, up, DOWN, scalings, "tanh"))
    with pytest.raises(ValueError, match=r"matmul needs a \(m, k\) and b \(n, k\)"):
        jax.eval_shape(lambda: norm_mlp(X, norm, up, DOWN, SCALINGS, "geglu"))  # halves what DOWN takes whole


@pytest.mark.parametrize("scalings", [SCALINGS, None], ids=["fp8", "plain"])
def test_gate_and_up_side_by_side_are_one_kernel(scalings):
    """To the bit, the gate in the first half."""
    norm, up = make_parameters("rmsnorm", "swiglu")
    apart = LinearParameters(*(tuple(jnp.split(leaf, 2, axis=-1)) for leaf in (up.kernel, up.bias)))
    y, amaxes, dx, dnorm, dup, ddown = run(norm, up, "swiglu", scalings)
    dup = LinearParameters(*(tuple(jnp.split(leaf, 2, axis=-1)) for leaf in (dup.kernel, dup.bias)))
    got = run(norm, apart, "swiglu", scalings)
    jax.tree.map(assert_same_bits, got, (y, amaxes, dx, dnorm, dup, ddown))
    swapped = LinearParameters(apart.kernel[::-1], apart.bias[::-1])
    with pytest.raises(AssertionError):
        assert_same_bits(run(norm, swapped, "swiglu", scalings)[0], y)

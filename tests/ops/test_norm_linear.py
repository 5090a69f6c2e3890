"""`norm_linear` is `linear` after `normalize`, to the bit; close to the layers without FP8;
and keeps no normalized tensor.
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
from jax_fp8.kernels.norm import NormParameters, norm_backward, norm_quantize, normalize
from jax_fp8.ops.linear import linear
from jax_fp8.ops.norm_linear import norm_linear
from jax_fp8.ops.parameters import LinearParameters

pytestmark = pytest.mark.versions

BATCH, SEQUENCE, K, N = 2, 24, 32, 48
EPSILON = 1e-2
CURRENT = Fp8Gemm(CurrentScaling(), "qkv")
DELAYED = Fp8Gemm(DelayedScaling(), "qkv", jnp.float32([0.01, 0.02, 1e-4]))


def array(seed, *shape, dtype=np.float32, mean=0.0) -> jax.Array:
    return jnp.asarray((np.random.default_rng(seed).normal(size=shape) + mean).astype(dtype))


X = array(0, BATCH, SEQUENCE, K, dtype=ml_dtypes.bfloat16, mean=0.3)
DY = array(1, BATCH, SEQUENCE, N, dtype=ml_dtypes.bfloat16)
PARAMETERS = LinearParameters(array(2, K, N), array(3, N))
NORMS = {
    "layernorm": NormParameters(array(4, K, mean=1.0), array(5, K)),
    "rmsnorm": NormParameters(array(4, K, mean=1.0), None),
}


@pytest.fixture(params=NORMS.values(), ids=NORMS)
def norm(request):
    return request.param


def run(norm, scaling, x=X, dy=DY, epsilon=EPSILON, **options):
    """y, the amaxes, and the gradients of x, of the norm's parameters and of the GEMM's."""
    (y, amaxes), pullback = jax.vjp(lambda *args: norm_linear(*args, scaling, epsilon, **options), x, norm, PARAMETERS)
    return y, amaxes, *pullback((dy, amaxes if amaxes is None else jnp.zeros_like(amaxes)))


def expected(norm):
    fn = lambda x, norm, parameters: plain.linear(plain.normalize(x, norm, EPSILON), parameters)  # noqa: E731
    return plain.result_and_gradients(fn, DY, X, norm, PARAMETERS)


@pytest.mark.parametrize("scaling", [CURRENT, DELAYED], ids=["current", "delayed"])
def test_is_its_parts_to_the_bit(norm, scaling):
    rows = X.reshape(-1, K)
    normalized, _ = normalize(rows, norm, EPSILON, jnp.bfloat16)
    *_, statistics = norm_quantize(
        rows, norm, EPSILON, Cast.with_scale(E4M3, 1.0)
    )  # the compiler's to the last bit, as the op's are
    (y, amaxes), pullback = jax.vjp(lambda x, parameters: linear(x, parameters, scaling), normalized, PARAMETERS)
    dnormalized, gradients = pullback((DY.reshape(-1, N), jnp.zeros_like(amaxes)))
    dx, dnorm = norm_backward(dnormalized, rows, norm, statistics)
    parts = (y.reshape(DY.shape), amaxes, dx.reshape(X.shape), dnorm, gradients)
    jax.tree.map(assert_same_bits, run(norm, scaling), parts)
    with pytest.raises(AssertionError):
        jax.tree.map(assert_same_bits, run(norm, scaling, epsilon=2 * EPSILON), parts)


def test_against_float64(norm):
    y, _, dx, dnorm, gradients = run(norm, CURRENT)
    expected_y, (expected_dx, expected_dnorm, expected_gradients) = expected(norm)
    assert_close(y, expected_y, "linear")
    for actual, of in zip(
        jax.tree.leaves((dx, dnorm, gradients)),
        jax.tree.leaves((expected_dx, expected_dnorm, expected_gradients)),
        strict=True,
    ):
        assert_close(actual, of, "linear_gradient")


def test_the_other_norm_would_be_noticed(norm):
    other = NORMS["rmsnorm" if norm.bias is not None else "layernorm"]
    y, _, dx, _, gradients = run(norm, CURRENT)
    expected_y, (expected_dx, _, expected_gradients) = expected(other)
    for actual, of, kind in (
        (y, expected_y, "linear"),
        (dx, expected_dx, "linear_gradient"),
        (gradients.kernel, expected_gradients.kernel, "linear_gradient"),
    ):
        with pytest.raises(AssertionError, match="relative error"):
            assert_close(actual, of, kind)


def test_without_scaling_it_is_plain(norm):
    y, amaxes, *gradients = run(norm, None)
    expected_y, expected_gradients = expected(norm)
    assert amaxes is None
    assert_close(y, expected_y, "bfloat16")
    for actual, of in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        assert_close(actual, of, "bfloat16")


def test_the_amax_is_that_of_the_normalized_input(norm):
    ref = jax.new_ref(jnp.zeros(3))
    scaling = Fp8Gemm(DelayedScaling(), "qkv", jnp.ones(3), Record(ref))
    amaxes = run(norm, scaling)[1]
    normalized, _ = normalize(X, norm, EPSILON, jnp.bfloat16)
    measured = np.array([reference.amax(array) for array in (normalized, PARAMETERS.kernel, DY)])
    assert_same_bits(amaxes, measured[:2])
    assert_same_bits(ref[...], measured)
    assert amaxes[0] != reference.amax(X)


def test_the_forward_alone_is_the_same(norm):
    jax.tree.map(assert_same_bits, norm_linear(X, norm, PARAMETERS, CURRENT, EPSILON), run(norm, CURRENT)[:2])


def test_the_backward_keeps_x_but_not_the_normalized_tensor(norm):
    pullback = jax.eval_shape(
        lambda *args: jax.vjp(lambda *args: norm_linear(*args, CURRENT), *args)[1], X, norm, PARAMETERS
    )
    kept = jax.tree.leaves(pullback)
    assert [leaf.size for leaf in kept if leaf.dtype == jnp.bfloat16 and leaf.size] == [X.size]
    assert sorted(leaf.shape for leaf in kept if leaf.dtype == E4M3) == [(K, N), (K, BATCH * SEQUENCE)]
    largest_float32 = max(leaf.size for leaf in kept if leaf.dtype == jnp.float32)
    assert largest_float32 == BATCH * SEQUENCE  # a statistic per row, and no row


@pytest.mark.parametrize("scaling", [CURRENT, DELAYED], ids=["current", "delayed"])
def test_recomputing_gives_the_same_bits_and_keeps_less(norm, scaling):
    jax.tree.map(assert_same_bits, run(norm, scaling, recompute=True), run(norm, scaling))
    pullback = jax.eval_shape(
        lambda *args: jax.vjp(lambda *args: norm_linear(*args, scaling, recompute=True), *args)[1], X, norm, PARAMETERS
    )
    assert [leaf.shape for leaf in jax.tree.leaves(pullback) if leaf.dtype == E4M3] == [(K, N)]


@pytest.mark.parametrize("scaling", [CURRENT, None], ids=["fp8", "plain"])
def test_the_gradient_of_the_returned_input_is_added(norm, scaling):
    """As that of a residual branch: it reaches x whole, in the pass of the norm's backward."""
    dresidual = array(6, BATCH, SEQUENCE, K, dtype=ml_dtypes.bfloat16)

    def with_input(x, norm, parameters):
        return norm_linear(x, norm, parameters, scaling, EPSILON, return_input=True)

    ((y, x), amaxes), pullback = jax.vjp(with_input, X, norm, PARAMETERS)
    dx, *gradients = pullback(((DY, dresidual), jax.tree.map(jnp.zeros_like, amaxes)))
    expected_y, _, expected_dx, *expected_gradients = run(norm, scaling)
    assert_same_bits(x, X)
    jax.tree.map(assert_same_bits, (y, gradients), (expected_y, expected_gradients))
    assert_close(dx, expected_dx.astype(jnp.float32) + dresidual.astype(jnp.float32), "bfloat16")
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(dx, expected_dx, "bfloat16")


def test_rows_must_be_a_multiple_of_16_for_the_gradient(norm):
    with pytest.raises(ValueError, match=r"qkv: the weight gradient contracts over .* multiple of 16, got 20"):
        jax.eval_shape(lambda: run(norm, CURRENT, x=X[:, :10], dy=DY[:, :10]))

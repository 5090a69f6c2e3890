"""Norms against float64, forward and the hand-written backward."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import plain
import pytest
from reference import assert_close, assert_same_bits

from jax_fp8.ops.norm import NormParameters, check_norm, normalize, normalize_backward

EPSILON = 1e-3  # large enough to matter to the numbers below


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
    actual, statistics = normalize(jnp.asarray(x), norm, EPSILON, dtype)
    assert_close(actual, y, kind)
    actual_dx, actual_dnorm = normalize_backward(jnp.asarray(dy), jnp.asarray(x), norm, statistics)
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
    actual, statistics = normalize(jnp.asarray(x), norm, 0.0 if wrong == "epsilon" else EPSILON, jnp.float32)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(actual, y, "float32")
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(normalize_backward(jnp.asarray(dy), jnp.asarray(x), norm, statistics)[0], dx, "float32")


def test_a_large_mean_is_subtracted_before_squaring():
    x = array(0, 4, 24, mean=1000.0)
    y, _ = expected(x, parameters("layernorm"), x)
    assert_close(
        normalize(jnp.asarray(x), parameters("layernorm"), EPSILON, jnp.float32)[0], y, "float16"
    )  # x itself has 24 bits


def test_rounded_once():
    """bfloat16 in and out is float32 in between, to the bit."""
    x, norm = array(0, 32, 24, dtype=ml_dtypes.bfloat16), parameters("layernorm", dtype=ml_dtypes.bfloat16)
    in_float32, _ = normalize(
        jnp.asarray(x, jnp.float32), jax.tree.map(lambda leaf: leaf.astype(np.float32), norm), EPSILON, jnp.float32
    )
    assert_same_bits(normalize(jnp.asarray(x), norm, EPSILON, jnp.bfloat16)[0], in_float32.astype(jnp.bfloat16))


def test_gradients_have_the_dtypes_of_what_they_are_gradients_of():
    x, norm = jnp.asarray(array(0, 32, 24, dtype=ml_dtypes.bfloat16)), parameters("layernorm", dtype=ml_dtypes.bfloat16)
    _, statistics = normalize(x, norm, EPSILON, jnp.float32)
    gradients = normalize_backward(x, x, norm, statistics)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_check_norm_passes(norm):
    check_norm(norm)


@pytest.mark.parametrize("norm", ["LayerNorm", "batchnorm", None])
def test_check_norm_refuses(norm):
    with pytest.raises(ValueError, match=rf"norm must be one of \('layernorm', 'rmsnorm'\), got {norm!r}"):
        check_norm(norm)

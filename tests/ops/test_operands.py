"""Inputs and output gradients as GEMMs get them, and what is recorded of their casts: nothing, unless somebody asks."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.core.formats import INPUT, OUTPUT_GRADIENT
from jax_fp8.core.fp8_gemm import CAST_STATISTICS, OBSERVED, Fp8Gemm, Record
from jax_fp8.core.health import STATISTICS
from jax_fp8.ops.operands import quantize_gradient, quantize_input
from jax_fp8.ops.parameters import LinearParameters

SCALES = jnp.asarray([1 / 448, 1.0, 1 / 57344])
GEMM = Fp8Gemm(fp8.DelayedScaling(amax_history_len=4), "layer", SCALES)
X = jax.random.normal(jax.random.key(0), (32, 64), jnp.bfloat16)
REACH, SATURATED = STATISTICS.index("reach"), STATISTICS.index("saturated")


def observed(function, *args, gemm=GEMM) -> tuple:
    """What a function of a GEMM returns, and what it left, f32[2, STATISTICS]."""

    def run(*args):
        ref = jax.new_ref(jnp.zeros((len(OBSERVED), len(STATISTICS))))
        out = function(*args, replace(gemm, record=Record(measured={CAST_STATISTICS: ref})))
        return out, ref[...]

    return jax.jit(run)(*args)


@pytest.mark.parametrize("keep", [True, False])
def test_an_input_is_observed_only_where_somebody_asks(keep):
    unobserved = quantize_input(X, GEMM, keep)
    assert unobserved.health is None
    assert (unobserved.pair.columnwise is not None) == keep

    def with_health(x, gemm):
        found = quantize_input(x, gemm, keep)
        return found.pair, found.health

    (pair, health), left = observed(with_health, X)
    assert np.array_equal(pair.rowwise.values, unobserved.pair.rowwise.values)
    assert health[REACH] == pytest.approx(float(jnp.max(jnp.abs(X))))  # in units of the scale's largest number
    assert health[SATURATED] == pytest.approx(float(jnp.mean(jnp.abs(X.astype(jnp.float32)) > 464 / 448)), abs=1e-6)
    assert not left.any()  # a backward pass records it


@pytest.mark.parametrize("use_bias", [True, False])
def test_a_gradient_is_recorded_in_its_own_row(use_bias):
    like = LinearParameters(jnp.zeros((16, 64)), jnp.zeros(64) if use_bias else None)
    (_, sums), left = observed(lambda dy, gemm: quantize_gradient(dy, like, gemm), X)
    assert (sums is not None) == use_bias
    rows = dict(zip(OBSERVED, left, strict=True))
    assert rows[OUTPUT_GRADIENT][REACH] == pytest.approx(float(jnp.max(jnp.abs(X))))
    assert not rows[INPUT].any()
    parts = jnp.split(X, 2, axis=1)
    _, of_parts = observed(lambda *args: quantize_gradient(args[:-1], like, args[-1]), *parts)
    np.testing.assert_allclose(of_parts, left, rtol=1e-6)

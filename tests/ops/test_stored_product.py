"""A product by a weight stored in FP8 is the product by what it stands for. tests/state/test_frozen_kernels.py has it
in models.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.core.fp8_array import Fp8Pair
from jax_fp8.kernels import few_rows_gemm
from jax_fp8.ops import stored_product as module
from jax_fp8.ops.stored_product import stored_product
from jax_fp8.ops.weights import frozen_weight

pytestmark = pytest.mark.versions
KERNEL = np.random.default_rng(0).normal(size=(256, 128)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(3, 5, 256)).astype(np.float32)


@pytest.mark.parametrize("recipe", [fp8.CurrentScaling(), fp8.BlockScaling()], ids=["one scale", "squares"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_product_by_the_dequantized_weight(recipe, dtype):
    weight = frozen_weight(recipe, (jnp.asarray(KERNEL),))
    x = jnp.asarray(X, dtype)
    exact = np.asarray(x, np.float64) @ np.asarray(weight.columnwise.dequantize(), np.float64).T
    with jax.default_matmul_precision("highest"):
        y = jax.jit(stored_product)(x, weight)
    assert y.dtype == dtype and y.shape == (3, 5, 128)
    allowed = (64 if dtype == "float32" else 4) * float(jnp.finfo(dtype).eps) * np.abs(exact).std()
    assert np.abs(np.asarray(y, np.float64) - exact).max() <= allowed
    assert (
        np.abs(np.asarray(y, np.float64) - np.asarray(x, np.float64) @ KERNEL).max() > allowed / 4
    )  # negative control


def test_float16_does_not_overflow():
    """Unscaled, the sum of these products is 256 * 448 * 64."""
    weight = frozen_weight(fp8.CurrentScaling(), (jnp.full((256, 16), 1 / 512),))
    y = stored_product(jnp.full((1, 256), 64, jnp.float16), weight)
    np.testing.assert_allclose(np.asarray(y, np.float32), 32, rtol=2e-3)


def test_kernels_that_are_apart_and_gradients():
    """The input has a gradient, the weight has none."""
    whole = frozen_weight(fp8.CurrentScaling(), (jnp.asarray(KERNEL),))
    values, scale = whole.columnwise.values, whole.columnwise.scale
    parts = tuple(fp8.Fp8Array(part, scale) for part in (values[:48], values[48:]))
    x = jnp.asarray(X)

    def total(x, scale):
        weight = Fp8Pair(None, tuple(fp8.Fp8Array(part.values, scale) for part in parts), whole.amax)
        return (stored_product(x, weight) ** 2).sum()

    with jax.default_matmul_precision("highest"):
        np.testing.assert_array_equal(stored_product(x, Fp8Pair(None, parts, whole.amax)), stored_product(x, whole))
        dx, dscale = jax.grad(total, argnums=(0, 1))(x, scale)
    kernel = np.asarray(whole.columnwise.dequantize(), np.float64)
    np.testing.assert_allclose(dx, 2 * (X.astype(np.float64) @ kernel.T) @ kernel, rtol=1e-4, atol=1e-2)
    assert np.abs(dx).max() > 1 and dscale == 0


@pytest.mark.parametrize("recipe", [fp8.CurrentScaling(), fp8.BlockScaling()], ids=["one scale", "squares"])
def test_few_rows_go_to_their_kernel(recipe, monkeypatch):
    """Where they are chosen: the same product and the same gradient, also for more rows, which it does not take."""
    weight, taken = frozen_weight(recipe, (jnp.asarray(KERNEL),)), []
    multiply = few_rows_gemm.multiply_few_rows
    monkeypatch.setattr(few_rows_gemm, "MOST_ROWS", 15)
    monkeypatch.setattr(module, "multiply_few_rows", lambda *a, **options: taken.append(1) or multiply(*a, **options))
    for rows, times in ((3, 1), (5, 1), (4, 0)):
        x = jnp.asarray(X[:rows] if times else np.concatenate([X, X]), jnp.bfloat16)
        loss = lambda x: (stored_product(x, weight).astype(jnp.float32) ** 2).sum()  # noqa: E731
        y, dx = stored_product(x, weight), jax.grad(loss)(x)
        exact = np.asarray(x, np.float64) @ np.asarray(weight.columnwise.dequantize(), np.float64).T
        assert np.abs(np.asarray(y, np.float64) - exact).max() <= np.abs(exact).max() / 100
        wanted = 2 * exact @ np.asarray(weight.columnwise.dequantize(), np.float64)
        assert np.abs(np.asarray(dx, np.float64) - wanted).max() <= np.abs(wanted).max() / 30
        assert bool(taken) == bool(times) and not taken.clear()

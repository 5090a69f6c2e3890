"""A linear map for each expert: forward and gradients against dense float64 products, in every recipe."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts import RECIPES
from reference import assert_close, assert_same_bits, relative_error

import jax_fp8 as fp8
from jax_fp8.core.fp8_gemm import Fp8Gemm
from jax_fp8.ops.expert_rows import sort_tokens, take_rows
from jax_fp8.ops.grouped_linear import cast_experts, grouped_linear
from jax_fp8.ops.linear import linear
from jax_fp8.ops.parameters import LinearParameters

TOKENS, EXPERTS, K, N = 200, 4, 128, 256

SORT, TAKE = jax.jit(sort_tokens, static_argnums=1), jax.jit(take_rows)


def inputs(dtype=jnp.float32, widths=(N,), param_dtype=jnp.float32):
    """Rows in groups, one of which is empty, kernels, and an output gradient."""
    rng = np.random.default_rng(0)
    choices = rng.permutation([0, 1, 3] * TOKENS)[: 2 * TOKENS].reshape(TOKENS, 2).astype(np.int32)
    where = SORT(choices, EXPERTS)
    rows = TAKE(rng.normal(size=(TOKENS, K)).astype(dtype), where)
    kernels = [(rng.normal(size=(EXPERTS, K, n)) / K**0.5).astype(param_dtype) for n in widths]
    dy = TAKE(rng.normal(size=(TOKENS, sum(widths))).astype(dtype), where)
    return rows, tuple(kernels), where, dy


@partial(jax.jit, static_argnums=(4, 5))
def run(rows, kernels, where, dy, recipe, dtype=jnp.float32):
    """y, and the gradients of rows and kernels."""
    gemm = None if recipe is None else Fp8Gemm(recipe, "mlp/up")
    in_parts = len(kernels) > 1

    def forward(rows, kernels):
        parameters = LinearParameters(kernels if in_parts else kernels[0], None)
        return grouped_linear(rows, parameters, where, gemm, dtype)[0]

    y, pullback = jax.vjp(forward, rows, kernels)
    return y, *pullback(dy.astype(y.dtype))


def dense(rows, kernel, where, dy):
    """The same in float64, expert by expert."""
    rows, kernel, dy = (np.asarray(array, np.float64) for array in (rows, kernel, dy))
    y, drows, dkernel = np.zeros((len(rows), kernel.shape[2])), np.zeros(rows.shape), np.zeros(kernel.shape)
    starts = np.asarray(where.starts)
    for expert in range(EXPERTS):
        group = slice(starts[expert], starts[expert + 1])
        y[group], drows[group] = rows[group] @ kernel[expert], dy[group] @ kernel[expert].T
        dkernel[expert] = rows[group].T @ dy[group]
    return y, drows, dkernel


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("widths", [(N,), (N, 128)])
def test_against_float64(name, widths):
    """As near as one linear map in FP8 is to its float64 product."""
    rows, kernels, where, dy = inputs(widths=widths)
    y, drows, dkernels = run(rows, kernels, where, dy, RECIPES[name])
    wanted_y, wanted_drows, wanted_dkernel = dense(rows, np.concatenate(kernels, axis=2), where, dy)
    assert_close(y, wanted_y, "linear")
    assert_close(drows, wanted_drows, "linear_gradient")
    assert_close(np.concatenate(dkernels, axis=2), wanted_dkernel, "linear_gradient")
    assert [gradient.shape for gradient in dkernels] == [kernel.shape for kernel in kernels]
    assert not np.asarray(dkernels[0])[2].any()  # no token goes there
    others = np.roll(np.concatenate(kernels, axis=2), 1, axis=0)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(y, dense(rows, others, where, dy)[0], "linear")


def test_in_float32_without_fp8():
    rows, kernels, where, dy = inputs()
    found = run(rows, kernels, where, dy, None)
    wanted = dense(rows, kernels[0], where, dy)
    for array, exact in zip((found[0], found[1], found[2][0]), wanted, strict=True):
        assert_close(array, exact, "float32")


def test_filling_that_is_not_zero_would_be_noticed():
    """It would be in the gradients of kernels, which add up all rows of a group."""
    rows, kernels, where, dy = inputs()
    is_filling = np.asarray(where.pairs == 2 * TOKENS)[:, None]
    wanted = dense(rows, kernels[0], where, dy)[2]
    assert np.sum(is_filling) > 100
    assert_close(run(rows, kernels, where, dy, RECIPES["current"])[2][0], wanted, "linear_gradient")
    filled = [np.where(is_filling, np.float32(1), np.asarray(array)) for array in (rows, dy)]
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(run(filled[0], kernels, where, filled[1], RECIPES["current"])[2][0], wanted, "linear_gradient")


@pytest.mark.parametrize("name", RECIPES)
def test_one_expert_is_a_linear_map(name):
    """Bit for bit: the same casts, the same products. Small integers, whose sums are exact in any order."""
    rng = np.random.default_rng(0)
    shapes = {"x": (256, K), "kernel": (K, N), "dy": (256, N)}
    x, kernel, dy = (rng.integers(-3, 4, shape).astype(jnp.bfloat16) for shape in shapes.values())
    kernel = kernel.astype(np.float32)
    where = SORT(np.zeros((256, 1), np.int32), 1)
    y, dx, (dkernel,) = run(TAKE(x, where), (kernel[None],), where, dy, RECIPES[name], jnp.bfloat16)

    @jax.jit
    def alone(x, kernel, dy):
        gemm = Fp8Gemm(RECIPES[name], "mlp/up")
        y, pullback = jax.vjp(lambda x, kernel: linear(x, LinearParameters(kernel, None), gemm)[0], x, kernel)
        return y, *pullback(dy)

    for found, exact in zip((y, dx, dkernel[0]), alone(x, kernel, dy), strict=True):
        assert_same_bits(found, exact)


@pytest.mark.parametrize("name", RECIPES)
def test_all_experts_share_the_cast_of_their_kernels(name):
    """One scale, or by tile that of each square: both orientations are the same numbers."""
    _, (kernel,), _, _ = inputs()
    kernel[2] *= 8
    pair = jax.jit(lambda kernel: cast_experts(LinearParameters(kernel, None), Fp8Gemm(RECIPES[name], "mlp/up")))(
        kernel
    )
    assert pair.rowwise.shape == (EXPERTS, K, N) and pair.columnwise.shape == (EXPERTS, N, K)
    rowwise, columnwise = jax.jit(lambda pair: (pair.rowwise.dequantize(), pair.columnwise.dequantize()))(pair)
    assert_same_bits(rowwise, np.swapaxes(columnwise, 1, 2))
    assert_close(rowwise, kernel, "float8_e4m3fn")
    assert pair.rowwise.scale.shape == ((EXPERTS, 1, 2) if name == "block" else ())
    assert pair.columnwise.scale.shape == ((EXPERTS, 2, 1) if name == "block" else ())
    assert float(pair.amax) == np.max(np.abs(kernel))


def test_gradients_have_the_dtype_of_the_params():
    rows, kernels, where, dy = inputs(jnp.bfloat16, param_dtype=jnp.bfloat16)
    y, drows, (dkernel,) = run(rows, kernels, where, dy, fp8.CurrentScaling(), jnp.bfloat16)
    assert y.dtype == drows.dtype == dkernel.dtype == jnp.bfloat16
    assert relative_error(dkernel, dense(rows, kernels[0], where, dy)[2]) < 0.08


def test_refusals():
    rows, (kernel,), where, _ = inputs()
    gemm = Fp8Gemm(fp8.BlockScaling(), "layer_0/mlp/up")
    refused = [
        (r"kernels of experts must be \(experts, in, out\)", LinearParameters(kernel[0], None), rows),
        ("experts have no bias", LinearParameters(kernel, np.ones((EXPERTS, N))), rows),
        (
            "layer_0/mlp/up: kernels of experts with scales by tile need in and out features divisible by 128, "
            "got 96 and 256",
            LinearParameters(kernel[:, :96], None),
            rows[:, :96],
        ),
    ]
    for sentence, parameters, given in refused:
        with pytest.raises(ValueError, match=sentence):
            jax.eval_shape(lambda rows, p=parameters: grouped_linear(rows, p, where, gemm), given)

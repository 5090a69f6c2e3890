"""How a cast went: counted with NumPy, for tensors in which it is known what happens to each element."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

import jax_fp8 as fp8
from jax_fp8.core.cast import Cast
from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.core.health import ROWS, STATISTICS, measure
from jax_fp8.core.scale import ScaleFormula
from jax_fp8.kernels.amax import amax_reference
from jax_fp8.kernels.casting import cast_reference, quantize_reference

MAX = {fp8.E4M3: 448.0, fp8.E5M2: 57344.0}
HALF_A_STEP = {fp8.E4M3: 16.0, fp8.E5M2: 4096.0}  # above the largest number, up to which rounding leads back to it
SMALLEST = {fp8.E4M3: 2.0**-9, fp8.E5M2: 2.0**-16}  # subnormal


def health(*sources, dtype=fp8.E4M3, scale=1.0) -> dict[str, float]:
    found = measured(sources, np.asarray(scale, np.float32), dtype)
    return dict(zip(STATISTICS, map(float, found), strict=True))


@partial(jax.jit, static_argnums=2)
def measured(sources, scale, dtype):
    x = jnp.concatenate(sources, axis=1)
    return measure(lambda *rows: rows, sources, Fp8Array(quantize_reference(x, dtype, scale), scale), amax_reference(x))


@pytest.mark.parametrize("dtype", [fp8.E4M3, fp8.E5M2], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("scale", [1.0, 2.0**-100, 2.0**100])
def test_shares_are_those_of_the_elements_that_were_planted(dtype, scale):
    x = np.full((16, 32), 1.0, np.float32)
    x[0, :8] = 0  # which stays zero
    x[1, :3] = SMALLEST[dtype] / 4  # which becomes zero
    x[2, :5] = -(MAX[dtype] + HALF_A_STEP[dtype]) * 1.01  # cut off
    x[3, :7] = MAX[dtype] + HALF_A_STEP[dtype] * 0.99  # only rounded
    found = health(x * np.float32(scale), dtype=dtype, scale=scale)
    assert found["underflowed"] == pytest.approx(3 / 512)
    assert found["saturated"] == pytest.approx(5 / 512)
    assert found["nonfinite"] == 0
    assert found["scale"] == scale
    assert found["amax"] == pytest.approx(scale * np.abs(x).max())
    assert found["reach"] == pytest.approx(np.abs(x).max() / MAX[dtype])
    q = reference.quantize(x, dtype, 1)[0].astype(np.float64)
    assert found["error"] == pytest.approx(np.sqrt(np.sum((x - q) ** 2) / np.sum(np.float64(x) ** 2)), rel=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_error_is_that_of_rounding(dtype):
    x = np.random.default_rng(0).normal(size=(256, 512)).astype(dtype)
    assert 0.02 < health(x, scale=4 / 448)["error"] < 0.03  # 3 bits of mantissa
    assert 0.04 < health(x, dtype=fp8.E5M2, scale=4 / 57344)["error"] < 0.06  # 2 bits
    assert health(x, scale=1.0)["error"] < 0.03 < health(x, scale=4096.0)["error"]  # too large a scale: all is zero
    assert health(x, scale=4096.0)["underflowed"] > 0.9
    exact = np.asarray([[0.5, -2.0, 448.0]] * 16, dtype)
    assert health(exact)["error"] == 0


def test_what_is_not_finite_is_counted_and_spoils_nothing_else():
    x = np.ones((16, 16), np.float32)
    x[0, :2], x[1, 0] = np.inf, np.nan
    found = health(x)
    assert found["nonfinite"] == pytest.approx(3 / 256)
    assert (found["error"], found["underflowed"]) == (0, 0)
    assert found["saturated"] == pytest.approx(2 / 256)
    assert np.isnan(found["amax"])


def test_zeros_have_no_error():
    found = health(np.zeros((16, 16), np.float32))
    assert [found[name] for name in STATISTICS] == [0, 1, 0, 0, 0, 0, 0]


def test_matrices_side_by_side_are_one_tensor():
    x = np.random.default_rng(1).normal(size=(32, 48), scale=300).astype(np.float32)
    together, apart = health(*np.split(x, [16, 24], axis=1)), health(x)
    assert together == pytest.approx(apart, rel=1e-6)
    assert together["saturated"] > 0


def test_scales_by_tile_are_those_of_their_elements():
    x = np.float32([[1.0] * 4 + [1000.0] * 4] * 8)
    by_tile = np.float32([[1 / 448, 1000 / 448]] * 8)
    assert health(x, scale=by_tile)["error"] < 1e-6
    assert health(x, scale=by_tile)["saturated"] == 0 < health(x, scale=by_tile[:, ::-1])["saturated"]


def test_tiles_of_zeros_say_nothing_of_the_scale():
    """Their scale is 1, which could be far above all others: then a tensor would seem to have room."""
    x = np.float32([[0.0] * 4 + [1e-3] * 3 + [0.0]] * 8)
    found = health(x, scale=[[1.0, 1e-3 / 448]] * 8)
    assert found["scale"] == pytest.approx(1e-3 / 448) and found["reach"] == pytest.approx(1)
    assert health(x, scale=1e-3 / 448) == pytest.approx(found)  # one scale says the same
    zeros = health(np.zeros((16, 16), np.float32), scale=np.ones((16, 2)))
    assert [zeros[name] for name in STATISTICS] == [0, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("tile", [(128, 128), (128, 1)])
def test_rows_are_sampled_with_the_scales_of_their_tiles(tile):
    sizes = np.exp2(np.arange(4 * ROWS)[:, None] // 128 % 5 * 4)
    x = (np.random.default_rng(2).normal(size=(4 * ROWS, 200)) * sizes).astype(np.float32)
    cast = jax.jit(lambda x: cast_reference(x, Cast.by_tile(fp8.E4M3, tile, ScaleFormula())))(x)
    measured = jax.jit(lambda x, cast: measure(lambda x: (x,), (x,), cast, amax_reference(x)))
    found = dict(zip(STATISTICS, map(float, measured(x, cast)), strict=True))
    assert 0.02 < found["error"] < 0.03 and found["saturated"] == 0 and found["reach"] == pytest.approx(1, rel=0.01)
    wrong = Fp8Array(cast.values, np.roll(cast.scale, 1, axis=0), tile)
    assert measured(x, wrong)[-1] > 0.5


def test_many_rows_are_sampled_and_none_is_measured_twice():
    rows, taken = 4 * ROWS, []

    def sources_of(some):
        taken.append(some.shape)
        return (some,)

    x = np.random.default_rng(2).normal(size=(rows, 16)).astype(np.float32)
    scale = np.float32(1 / 448)
    cast, amax = Fp8Array(reference.quantize(x, fp8.E4M3, scale)[0], scale), reference.amax(x)
    found = jax.jit(lambda x, cast, amax: measure(sources_of, (x,), cast, amax))(x, cast, amax)
    some = dict(zip(STATISTICS, map(float, found), strict=True))
    assert taken == [(ROWS, 16)]
    share = np.mean(np.abs(x) > (448 + 16) / 448)
    assert some["saturated"] == pytest.approx(share, rel=0.05)
    assert some["amax"] == float(amax)


def test_a_nan_in_a_row_that_is_not_looked_at_is_still_said():
    x = np.ones((4 * ROWS, 16), np.float32)
    x[1, 3] = np.nan  # every fourth row counts
    assert health(x)["nonfinite"] == pytest.approx(1 / x.size)
    x[1, 3] = 1
    assert health(x)["nonfinite"] == 0

"""Block scaling as a whole: its GEMMs, and its gradients where a tensor has outliers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from reference import assert_close

import jax_fp8 as fp8
from jax_fp8.core.cast import LINE, SQUARE
from jax_fp8.core.formats import E4M3
from jax_fp8.core.fp8_array import Fp8Array, tiles_of
from jax_fp8.kernels.gemm import matmul

# ---- the GEMM --------------------------------------------------------------------------------------------------------


def blocks(seed, shape, tile) -> Fp8Array:
    exponents = np.random.default_rng(seed + 10).uniform(-5, 5, tiles_of(shape, tile))
    return Fp8Array(
        jnp.asarray(np.random.default_rng(seed).normal(size=shape, scale=10), jnp.float32).astype(E4M3),
        jnp.asarray(np.exp2(exponents), jnp.float32),
        tile,
    )


def whole_scales(array) -> np.ndarray:
    rows, columns = (np.arange(size) // length for size, length in zip(array.shape, array.tile, strict=True))
    return np.asarray(array.scale, np.float64)[rows][:, columns]


# m, n and k with cut tiles, and columns that begin at a square, or cut one.
@pytest.mark.parametrize("columns", [None, (128, 80), (48, 128)], ids=str)
@pytest.mark.parametrize(("a_tile", "b_tile"), [(LINE, SQUARE), (SQUARE, LINE), (LINE, LINE)], ids=str)
def test_block_scaling_against_float64(a_tile, b_tile, columns):
    a, b = blocks(0, (150, 336), a_tile), blocks(1, (208, 336), b_tile)
    exact = reference.matmul(a.values, b.values, whole_scales(a), whole_scales(b))
    wanted = np.s_[:, :] if columns is None else np.s_[:, columns[0] : sum(columns)]
    found = matmul(a, b, dtype=jnp.float32, columns=columns)
    assert_close(found, exact[wanted], "gemm_float32")
    swapped = reference.matmul(a.values, b.values, whole_scales(a), np.roll(whole_scales(b), 128, axis=1))
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(found, swapped[wanted], "gemm_bfloat16")


@pytest.mark.parametrize(
    ("a_tile", "b_tile", "columns", "scaling", "a_scales", "b_scales"),
    [
        (LINE, SQUARE, None, "1d2d", (3, 160), (2, 4)),
        (SQUARE, LINE, None, "2d1d", (2, 4), (3, 208)),
        (LINE, LINE, None, "1d1d", (3, 160), (3, 208)),
        (LINE, SQUARE, (128, 80), "1d2d", (3, 160), (2, 4)),  # the kernel finds its own
        (LINE, SQUARE, (48, 128), "1d1d", (3, 160), (3, 128)),  # squares that are cut become lines
    ],
    ids=str,
)
def test_block_scaling_as_cublaslt_reads_it(a_tile, b_tile, columns, scaling, a_scales, b_scales):
    """Scales of lines with rows side by side, those of squares with tiles of k; rows filled up to 16, scales to 4."""
    arrays = [blocks(0, (150, 336), a_tile), blocks(0, (208, 336), b_tile)]
    traced = jax.jit(lambda a, b: matmul(a, b, columns=columns)).trace(*arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (line for line in text.splitlines() if "@jax_fp8_gemm(" in line)
    shapes = [tuple(map(int, found.split("x"))) for found in re.findall(r"tensor<([\dx]+)xf32>", call)]
    assert f'scaling = "{scaling}"' in call and shapes == [a_scales, b_scales]
    rows = 150 if scaling == "2d1d" else 160
    assert f"tensor<{rows}x336xf8E4M3FN>" in call and "fast_accumulation = false" in call


# ---- gradients -------------------------------------------------------------------------------------------------------

LAYERS = ["Dense", "LayerNormDense", "LayerNormMLP"]
FINE, CURRENT, DELAYED = fp8.BlockScaling(wgrad="1d1d"), fp8.CurrentScaling(), fp8.DelayedScaling(amax_history_len=2)


@pytest.mark.parametrize(
    ("layer", "other"),
    [("Dense", CURRENT), *((layer, DELAYED) for layer in LAYERS)],
    ids=["Dense, current", *LAYERS],
)
def test_a_large_channel_of_inputs_costs_the_others_nothing_by_tile(layer, other, benchmark):
    """With one scale a tensor they are all but zero. Without the large channel both round, one of them to E5M2."""
    error, block = benchmark("outliers").error, fp8.BlockScaling()
    alone, beside = (error(layer, block, case) for case in ("none", "inputs, 100,000 times"))
    assert beside < 1.1 * alone < 0.07
    assert error(layer, other, "inputs, 100,000 times") > 5 * beside
    assert alone < error(layer, other, "none") < 2 * alone
    assert error(layer, other, "inputs, 1,000 times") < 2 * alone  # FP8 has a range of its own


def test_a_large_channel_of_gradients_costs_those_of_its_square(benchmark):
    error = benchmark("outliers").error
    alone, squares, lines = (
        error("Dense", recipe, case)
        for recipe, case in (
            (fp8.BlockScaling(), "none"),
            (fp8.BlockScaling(), "gradients, 100,000 times"),
            (FINE, "gradients, 100,000 times"),
        )
    )
    assert lines < 1.1 * alone < 0.05 and squares > 5 * lines
    assert error("Dense", fp8.BlockScaling(), "gradients, 1,000 times") < 1.1 * alone
    assert error("Dense", DELAYED, "gradients, 100,000 times") < 2 * lines  # E5M2 holds both


def test_the_table_has_a_row_for_each_recipe(benchmark, monkeypatch, capsys):
    outliers = benchmark("outliers")
    monkeypatch.setattr(outliers, "error", lambda layer, recipe, case: 0.01 * (list(outliers.CASES).index(case) + 1))
    assert outliers.main() == 0
    printed = capsys.readouterr().out
    assert printed.count("| 1.0 | 2.0 | 3.0 | 4.0 | 5.0 |") == len(LAYERS) * len(outliers.RECIPES)
    assert all(f"`{layer}`" in printed for layer in LAYERS)

"""The kernels that cast by tile on a GPU: bit for bit against NumPy, and then speed.

    python tests/gpu/tile_check.py --output tile_check.json      # two minutes on an H200
    python tests/gpu/tile_check.py --self-test                   # the reference in the kernels' place, on a CPU

A matrix as it is must have NumPy's bytes and scales. A norm or an activation may differ from float64 by a rounding. So
its bytes must be those that the kernel with one scale per tensor, which has checks of its own, writes with each tile's
scale. Every program runs twice, each time over memory filled with another pattern. Ends with one line per timing and
per group of checks, and with exit code 1 if a check failed.
"""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

import reference
from gpu.kernel_check import E4M3, SOURCES, seconds_per_call, twice_over_poison
from gpu.report import Report, Script, on_gpu, run_script

from jax_fp8.core.cast import LINE, SQUARE, Cast
from jax_fp8.core.fp8_array import tiles_of
from jax_fp8.core.scale import ScaleFormula
from jax_fp8.kernels.activation import activation_backward_quantize, activation_quantize
from jax_fp8.kernels.activation_functions import is_gated
from jax_fp8.kernels.norm import NormParameters, norm_quantize
from jax_fp8.kernels.quantize import quantize_rowwise, quantize_transpose, quantize_transpose_sums

MODES = {"1d1d": (LINE, LINE), "1d2d": (LINE, SQUARE), "2d2d": (SQUARE, SQUARE)}
FORMULAS = {"power of two": ScaleFormula(power_2_scale=True), "exact": ScaleFormula(), "epsilon": ScaleFormula(0, 1e-2)}
SHAPES = ((128, 128), (16, 16), (1, 1), (144, 272), (129, 127), (400, 1040), (1000, 336), (0, 16), (16, 0), (3, 4099))
SHAPES += ((2048, 1024), (528, 48))
# Of activations; the last two have more tiles than blocks run at once, and tails.
FUSED_SHAPES = ((256, 384), (144, 272), (33, 65), (1000, 336), (2048, 1024), (4112, 1424), (4112, 1408))
# Of norms: clusters of 1, 2, 4 and 8 blocks side by side; then two kernels, for tiles cut or too many columns.
NORM_SHAPES = ((400, 496), (144, 768), (272, 1024), (656, 2048), (16, 4096), (400, 4096), (144, 1040), (144, 4224))
SMALL = ((144, 272), (33, 65))
ACTIVATIONS = ("gelu", "silu", "squared_relu", "swiglu")
EPSILON = 1e-5


def cases():
    """Shapes, dtypes and modes: every mode of bfloat16, one of the others."""
    for number, shape in enumerate(SHAPES if on_gpu() else SMALL):
        yield from ((shape, jnp.bfloat16, mode) for mode in MODES)
        yield from ((shape, source, list(MODES)[number % 3]) for source in SOURCES[1:])


def fused_cases():
    """The same of norms and activations, which have fewer modes."""
    for number, shape in enumerate(FUSED_SHAPES if on_gpu() else SMALL):
        yield shape, SOURCES[number % 3], ("1d1d", "1d2d")[number % 2]


def norm_cases():
    """The fused cases, and shapes by line at which clusters of blocks read x once, or twice."""
    yield from fused_cases()
    for number, shape in enumerate(NORM_SHAPES if on_gpu() else SMALL[:1]):
        yield from ((shape, source, "1d1d") for source in (jnp.bfloat16, SOURCES[1 + number % 2]))


def uneven(seed, shape, dtype) -> np.ndarray:
    """Elements of many sizes, with a tile of zeros, and rows and columns much larger than others."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape, np.float32) * np.exp2(rng.integers(-8, 9, shape)).astype(np.float32)
    x[: shape[0] // 3, : shape[1] // 4] = 0
    x[:, ::37] *= 64
    return np.clip(x, -3e4, 3e4).astype(dtype)


def cast_by(mode, formula) -> Cast:
    return Cast.by_tile(E4M3, MODES[mode][0], FORMULAS[formula], MODES[mode][1])


# ---- the oracle ------------------------------------------------------------------------------------------------------


def spread(scales, shape, tile) -> np.ndarray:
    rows, columns = (np.arange(size) // length for size, length in zip(shape, tile, strict=True))
    return np.asarray(scales)[rows][:, columns]


def scales_of(x, tile, formula) -> np.ndarray:
    """The scales of a matrix, one for each tile."""
    down, across = tiles_of(x.shape, tile)
    magnitudes = np.zeros((down * tile[0], across * tile[1]), np.float32)
    found = np.abs(x.astype(np.float32))
    magnitudes[: x.shape[0], : x.shape[1]] = np.where(np.isnan(found), 0, found)
    amaxes = magnitudes.reshape(down, tile[0], across, tile[1]).max(axis=(1, 3), initial=0)
    of = FORMULAS[formula]
    return reference.current_scale(amaxes, E4M3, of.amax_epsilon, of.power_2_scale)


def check_pair(report: Report, group, label, pair, x, mode, formula):
    """Both orientations of a cast, bit for bit."""
    for array, matrix, tile in zip((pair.rowwise, pair.columnwise), (x, x.T), MODES[mode], strict=True):
        if array is None:
            continue
        scales = scales_of(matrix, tile, formula)
        which = f"{label} {'rowwise' if matrix is x else 'columnwise'}"
        report.bits(group, array.scale, scales, f"scales, {which}")
        report.bits(group, array.values, quantized(matrix, scales, tile), f"values, {which}")
    report.bits(group, pair.amax, reference.amax(x), f"amax of {label}")


def quantized(x, scales, tile) -> np.ndarray:
    return reference.quantize(x, E4M3, spread(scales, x.shape, tile))[0]


# ---- casts -----------------------------------------------------------------------------------------------------------


def check_quantize(report: Report):
    @partial(jax.jit, static_argnames=("mode", "formula"))
    def run(x, mode, formula):
        cast = cast_by(mode, formula)
        return quantize_transpose(x, cast), quantize_rowwise(x, cast), quantize_transpose_sums(x, cast)

    for number, (shape, source, mode) in enumerate(cases()):
        x, formula = uneven(number, shape, source), list(FORMULAS)[number % len(FORMULAS)]
        label = f"{jnp.dtype(source).name}{list(shape)} {mode}, {formula}"
        for both, rowwise, (summed, sums) in twice_over_poison(run, x, mode, formula):
            check_pair(report, "quantize", label, both, x, mode, formula)
            check_pair(report, "quantize rowwise", label, rowwise, x, mode, formula)
            check_pair(report, "quantize with sums", label, summed, x, mode, formula)
            exact, magnitude = (of(x.astype(np.float64)).sum(axis=0) for of in (np.asarray, np.abs))
            report.expect("sums", bool((np.abs(sums - exact) <= 1e-5 * magnitude).all()), label)


def check_every_bfloat16(report: Report):
    """All 65,536 patterns: in order, beside their neighbours, and each as the largest of a tile."""
    ordered = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16).reshape(512, 128)
    mixed = np.random.default_rng(0).permutation(ordered.reshape(-1)).reshape(256, 256)
    largest = np.zeros((2**15, 128), jnp.bfloat16)
    largest[:, 5] = ordered.reshape(-1)[: 2**15]
    with np.errstate(invalid="ignore"):
        largest[:, 7] = (largest[:, 5].astype(np.float32) / 3).astype(jnp.bfloat16)
    if not on_gpu():  # XLA's CPU compiler takes subnormal numbers for zero
        ordered, mixed, largest = (np.where(np.abs(x) < 1e-37, 0, x).astype(x.dtype) for x in (ordered, mixed, largest))
    for name, x in {"ordered": ordered, "mixed": mixed, "largest": largest, "transposed": largest.T.copy()}.items():
        for mode in MODES:
            for formula in FORMULAS:
                run = jax.jit(partial(quantize_transpose, cast=cast_by(mode, formula)))
                pair = jax.tree.map(np.asarray, run(jnp.asarray(x)))
                check_pair(report, "every bfloat16", f"{name} {mode}, {formula}", pair, x, mode, formula)


def check_side_by_side(report: Report):
    for widths in ((128, 64, 64), (256, 128, 128), (48, 16, 16), (20, 7)):
        x = uneven(1, (272, sum(widths)), jnp.bfloat16)
        parts = tuple(map(jnp.asarray, np.split(x, np.cumsum(widths)[:-1], axis=1)))
        run = jax.jit(lambda parts: quantize_transpose(parts, cast_by("1d2d", "power of two")))
        for pair in twice_over_poison(run, parts):
            check_pair(report, "side by side", f"{widths}", pair, x, "1d2d", "power of two")
        swapped = np.asarray(run(parts[::-1]).rowwise.values)
        same = np.array_equal(swapped.view(np.uint8), np.asarray(pair.rowwise.values).view(np.uint8))
        report.expect("side by side", not same, f"{widths}: their order does not matter")


def check_against_one_scale(report: Report, group, label, by_tile, others):
    """Tiles have the bytes of the kernel with one scale a tensor, and scales that no other is better than.

    Args:
      by_tile: an `Fp8Array`.
      others: its values with one scale a tensor, for each of its scales.
    """
    values, scales = np.asarray(by_tile.values), np.asarray(by_tile.scale)
    whole = spread(scales, values.shape, by_tile.tile)
    expected = np.empty(values.shape, values.dtype)
    for scale in np.unique(scales):
        expected = np.where(whole == scale, others[scale], expected)
    report.bits(group, values, expected, f"values of {label}")
    report.expect(group, bool((np.log2(scales) % 1 == 0).all()), f"scales of {label} are powers of two")
    # Rounded up to a power of two, the scale brings the largest of a tile above 224, unless all of it is zero.
    down, across = scales.shape
    padded = np.zeros((down * by_tile.tile[0], across * by_tile.tile[1]), np.float32)
    padded[: values.shape[0], : values.shape[1]] = np.abs(values.astype(np.float32))
    largest = padded.reshape(down, by_tile.tile[0], across, by_tile.tile[1]).max(axis=(1, 3), initial=0)
    fits = ((largest >= 224) & (largest <= 448)) | ((largest == 0) & (scales == 1))
    report.expect(group, bool(fits.all()), f"scales of {label}: the largest values are {np.unique(largest)[:5]}")
    if scales.size > 1 and by_tile.tile == LINE:  # squares of a norm may all have the same
        moved = spread(np.roll(scales, 1), values.shape, by_tile.tile)
        report.expect(f"{group}: control", not np.array_equal(moved, whole), f"{label} has one scale")


def check_norms(report: Report):
    for number, (shape, source, mode) in enumerate(norm_cases()):
        rng = np.random.default_rng(number)
        scale, bias = (rng.normal(1, 1, shape[1]).astype(np.float32) for _ in range(2))
        for norm in (NormParameters(scale, bias), NormParameters(scale, None)):
            name = "rmsnorm" if norm.bias is None else "layernorm"
            label = f"{name} {jnp.dtype(source).name}{list(shape)} {mode}"
            check_norm(report, label, uneven(number, shape, source), norm, cast_by(mode, "power of two"))


def check_norm(report: Report, label, x, norm, cast):
    by_tile = jax.jit(lambda x: norm_quantize(x, norm, EPSILON, cast))
    one = jax.jit(lambda x, scale: norm_quantize(x, norm, EPSILON, Cast.with_scale(E4M3, scale)))
    alone, expected = one(x, np.float32(1))
    for pair, statistics in twice_over_poison(by_tile, x):
        check_both(report, "norm", label, pair, lambda scale: one(x, scale)[0])
        report.bits("norm: statistics", statistics.rstd, expected.rstd, label)
        if norm.bias is not None:
            report.bits("norm: statistics", statistics.mean, expected.mean, label)
        report.bits("norm: amax", pair.amax, alone.amax, label)


def check_activations(report: Report):
    for number, (shape, source, mode) in enumerate(fused_cases()):
        for activation in ACTIVATIONS:
            wide = (shape[0], 2 * shape[1]) if is_gated(activation) else shape
            x = (uneven(number, wide, np.float32) / 256).astype(source)
            label = f"{activation} {jnp.dtype(source).name}{list(shape)} {mode}"
            check_activation(report, label, uneven(number + 1, shape, source), x, activation, mode)


def check_activation(report: Report, label, dy, x, activation, mode):
    cast, lines, given = cast_by(mode, "power of two"), cast_by("1d1d", "power of two"), Cast.with_scale(E4M3, 1)
    forward = jax.jit(lambda x: activation_quantize(x, activation, lines))
    one = jax.jit(lambda x, scale: activation_quantize(x, activation, Cast.with_scale(E4M3, scale)))
    for pair in twice_over_poison(forward, x):
        check_both(report, "activation", label, pair, lambda scale: one(x, scale))
        report.bits("activation: amax", pair.amax, one(x, np.float32(1)).amax, label)
    backward = jax.jit(lambda dy, x: activation_backward_quantize(dy, x, activation, cast, lines))
    one_back = jax.jit(
        lambda dy, x, scale: activation_backward_quantize(dy, x, activation, Cast.with_scale(E4M3, scale), given)
    )
    expected, expected_sums, _ = one_back(dy, x, np.float32(1))
    for gradient, sums, again in twice_over_poison(backward, dy, x):
        report.bits("activated again", again.values, pair.columnwise.values, label)
        report.bits("activated again", again.scale, pair.columnwise.scale, f"scales of {label}")
        check_both(report, "gradient", label, gradient, lambda scale: one_back(dy, x, scale)[0])
        report.bits("gradient: amax", gradient.amax, expected.amax, label)
        finite = np.isfinite(expected_sums)  # float16 has overflowed in some columns
        largest = np.abs(expected_sums[finite]).max(initial=0)
        close = np.allclose(sums[finite], expected_sums[finite], rtol=1e-4, atol=1e-4 * largest)
        report.expect("gradient: sums", close and 2 * finite.sum() > finite.size, label)


def check_both(report: Report, group, label, pair, with_scale):
    """`check_against_one_scale` of both orientations; `with_scale(scale)` is the pair of the kernel with one scale."""
    found = {}
    for which in ("rowwise", "columnwise"):
        for scale in np.unique(getattr(pair, which).scale):
            if scale not in found:
                found[scale] = jax.tree.map(np.asarray, with_scale(jnp.float32(scale)))
        array = getattr(pair, which)
        others = {scale: getattr(one, which).values for scale, one in found.items()}
        check_against_one_scale(report, group, f"{which} {label}", array, others)


# ---- speed -----------------------------------------------------------------------------------------------------------


def copy_rate(bytes_moved) -> float:
    """Bytes per second of a copy that moves as many bytes, reads and writes together."""
    words = int(bytes_moved) // 8
    inputs = [(jax.random.bits(jax.random.key(i), (words,), jnp.uint32),) for i in range(8)]
    return 8 * words / seconds_per_call(lambda x: x ^ jnp.uint32(1), inputs)


def time_casts(report: Report):
    lines, coarse, squares = (cast_by(mode, "power of two") for mode in MODES)
    one = Cast.with_scale(E4M3, 0.01)
    for m, n in ((16384, 2048), (16384, 8192), (8192, 4096), (8192, 16384)):
        norm = NormParameters(jnp.ones(n), jnp.zeros(n))
        xs = [jax.random.normal(jax.random.key(i), (m, n), jnp.bfloat16) for i in range(6)]
        single, pairs = [(x,) for x in xs], list(zip(xs, xs[1:] + xs[:1], strict=True))
        wide = [jax.random.normal(jax.random.key(8 + i), (m, 2 * n), jnp.bfloat16) for i in range(6)]
        gated = list(zip(xs, wide, strict=True))
        calls = [
            ("quantize 1d1d", 4 + 2 / 32, lambda x: quantize_transpose(x, lines), single),
            ("quantize 1d2d", 4 + 1 / 32, lambda x: quantize_transpose(x, coarse), single),
            ("  one scale", 4, lambda x: quantize_transpose(x, one), single),
            ("quantize rowwise", 3 + 1 / 32, lambda x: quantize_rowwise(x, lines), single),
            ("quantize 1d2d with sums", 4 + 1 / 32, lambda x: quantize_transpose_sums(x, coarse), single),
            ("  one scale", 4, lambda x: quantize_transpose_sums(x, one), single),
            ("gelu rowwise", 3 + 1 / 32, lambda x: gelu_rowwise(x, lines), single),
            ("  one scale", 3, lambda x: gelu_rowwise(x, one), single),
            ("gradient of gelu", 7 + 2 / 32, gradient_of("gelu", coarse, lines), pairs),
            ("  one scale", 7, gradient_of("gelu", one, one), pairs),
            ("gradient of swiglu", 11 + 3 / 32, gradient_of("swiglu", coarse, lines), gated),
            ("  one scale", 11, gradient_of("swiglu", one, one), gated),
            # Of up to 4096 columns one kernel reads x once; of more, a second kernel reads it again.
            ("layernorm 1d1d", 4 + 2 / 32, lambda x, norm=norm: norm_quantize(x, norm, EPSILON, lines), single),
            ("  one scale", 4, lambda x, norm=norm: norm_quantize(x, norm, EPSILON, one), single),
        ]
        for what, width, call, batches in calls:
            time_one(report, what, (m, n), jnp.bfloat16, width, call, batches)
    for k, n in ((2048, 6144), (2048, 8192), (4096, 16384)):
        kernels = [(jax.random.normal(jax.random.key(i), (k, n), jnp.float32),) for i in range(6)]
        time_one(report, "weight 2d2d", (k, n), jnp.float32, 6, lambda x: quantize_transpose(x, squares), kernels)
        time_one(report, "  one scale", (k, n), jnp.float32, 6, lambda x: quantize_transpose(x, one), kernels)


def gelu_rowwise(x, cast):
    return activation_quantize(x, "gelu", cast, orientations="rowwise")


def gradient_of(activation, cast, of_activated):
    return lambda dy, x: activation_backward_quantize(dy, x, activation, cast, of_activated)


RATES = {}


def time_one(report, what, shape, dtype, width, call, batches):
    moved = np.prod(shape) * width
    if moved not in RATES:
        RATES[moved] = copy_rate(moved)
    seconds = seconds_per_call(call, batches)
    row = {"what": what, "shape": f"{jnp.dtype(dtype).name}{list(shape)}", "us": seconds * 1e6}
    report.timings.append(row | {"GB/s": moved / seconds / 1e9, "share of copy": moved / seconds / RATES[moved]})


CHECKS = [check_quantize, check_every_bfloat16, check_side_by_side, check_norms, check_activations]


def main(arguments: list[str] | None = None) -> int:
    script = Script(__file__, __doc__, CHECKS, [time_casts], target="jax_fp8_quantize_by_tile", self_test=True)
    return run_script(script, arguments)


if __name__ == "__main__":
    sys.exit(main())

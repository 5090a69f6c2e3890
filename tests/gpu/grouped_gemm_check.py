"""The grouped GEMMs of experts on a GPU: against float64, and then speed next to one GEMM with as many multiplications.

    python tests/gpu/grouped_gemm_check.py --output grouped_gemm_check.json    # some minutes on an H200
    python tests/gpu/grouped_gemm_check.py --self-test                         # the references in their place, on a CPU

Every program runs twice, each time over memory filled with another pattern. Ends with one line per timing and per group
of checks, and with exit code 1 if a check failed.
"""

import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu.kernel_check import E4M3, E5M2, seconds_per_call, twice_over_poison
from gpu.report import Report, Script, on_gpu, run_script

from jax_fp8.core.cast import LINE, SQUARE
from jax_fp8.core.fp8_array import Fp8Array, spread, tiles_of
from jax_fp8.kernels import extension
from jax_fp8.kernels.gemm import matmul
from jax_fp8.kernels.grouped_gemm import SQUARE_OF_EACH, TARGETS, grouped_matmul, grouped_weight_gradient

# Rows of each group, and how many are behind the last: even, uneven and some empty, all in one, many, no rows at all.
GROUPS = (((256, 256), 0), ((128, 0, 384, 0), 128), ((0, 0, 512), 0), ((128,) * 9 + (0,) * 7, 256), ((0, 0), 128))
SHAPES = ((512, 256), (400, 272), (16, 16), (144, 1040), (2064, 128))  # k and n
PAIRS = ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))
# |d - exact| <= ACCUMULATION * sum|a||b| + OUTPUT * |exact|, as in kernel_check.py, however the kernels accumulate.
ACCUMULATION = 2.0**-10
OUTPUT = {jnp.bfloat16: 2.0**-8, jnp.float16: 2.0**-10, jnp.float32: 2.0**-22}


def operand(rng, shape, dtype=E4M3, tile=None) -> Fp8Array:
    """Scales by tile are no powers of two, and differ from tile to tile."""
    values = jnp.asarray(rng.normal(size=shape) * 40, jnp.float32).astype(dtype)
    if tile is None:
        return Fp8Array(values, jnp.float32(0.003))
    return Fp8Array(values, jnp.asarray(np.exp2(rng.uniform(-4, 4, tiles_of(shape, tile))) / 1024, jnp.float32), tile)


def exact(x) -> np.ndarray:
    return np.asarray(x.values, np.float64) * np.asarray(spread(x.scale, x.shape, x.tile), np.float64)


def dense(one, other, starts, is_gradient) -> np.ndarray:
    """Group by group in float64: a product of each group's rows, or a weight's gradient from them."""
    groups = [slice(*bounds) for bounds in itertools.pairwise(starts)]
    if is_gradient:
        return np.stack([one[:, group] @ other[:, group].T for group in groups])
    d = np.zeros((one.shape[0], other.shape[1]))
    for expert, group in enumerate(groups):
        d[group] = one[group] @ other[expert].T
    return d


def check_products(report: Report):
    rng, counter = np.random.default_rng(0), itertools.count()
    for (sizes, behind), (k, n) in itertools.product(GROUPS, SHAPES if on_gpu() else SHAPES[1:3]):
        starts = np.cumsum([0, *sizes]).astype(np.int32)
        rows, experts = int(starts[-1]) + behind, len(sizes)
        label = f"rows {sizes} and {behind}, k {k}, n {n}"
        for pair in PAIRS:
            dtype = tuple(OUTPUT)[next(counter) % 3]
            a, b = operand(rng, (rows, k), pair[0]), operand(rng, (experts, n, k), pair[1])
            check_product(report, "grouped gemm", f"{pair} {label}", a, b, starts, dtype, is_gradient=False)
            a, b = operand(rng, (k, rows), pair[0]), operand(rng, (n, rows), pair[1])
            check_product(report, "grouped gradient", f"{pair} {label}", a, b, starts, dtype, is_gradient=True)
        for dtype in OUTPUT:
            a, b = operand(rng, (rows, k), tile=LINE), operand(rng, (experts, n, k), tile=SQUARE_OF_EACH)
            check_product(report, "grouped gemm, 1d2d", label, a, b, starts, dtype, is_gradient=False)
            a, b = operand(rng, (k, rows), tile=LINE), operand(rng, (n, rows), tile=SQUARE)
            check_product(report, "grouped gradient, 1d2d", label, a, b, starts, dtype, is_gradient=True)


def check_product(report: Report, group, label, a, b, starts, dtype, is_gradient):
    product = grouped_weight_gradient if is_gradient else grouped_matmul
    run = jax.jit(lambda a, b, starts: product(a, b, starts, dtype=dtype))
    first, second = twice_over_poison(run, a, b, jnp.asarray(starts))
    label = f"{label}, {jnp.dtype(dtype).name}"
    report.bits(group, first, second, f"{label}: two runs")
    if not is_gradient:
        matrices = jnp.asarray(np.ascontiguousarray(np.asarray(b.values).swapaxes(0, 1)))

        def of_one(a, matrices, scale, starts):
            b_again = Fp8Array(jnp.swapaxes(matrices, 0, 1), scale, b.tile)
            return grouped_matmul(a, b_again, starts, dtype=dtype, side_by_side=True)

        (again, _) = twice_over_poison(jax.jit(of_one), a, matrices, b.scale, jnp.asarray(starts))
        report.bits(group, again, first, f"{label}: matrices side by side")
    elif dtype == jnp.float32:
        c = jnp.asarray(np.random.default_rng(2).normal(size=first.shape), jnp.float32)
        add = jax.jit(lambda a, b, starts, c: grouped_weight_gradient(a, b, starts, c=c, alpha=0.5), donate_argnums=3)
        for added in twice_over_poison(lambda *given: add(*given, jnp.array(c)), a, b, jnp.asarray(starts)):
            off = np.abs(added - (0.5 * first.astype(np.float64) + np.asarray(c, np.float64)))
            small = 2.0**-22 * (np.abs(first) + np.abs(np.asarray(c)))
            report.expect(group, bool((off <= small).all()), f"{label}: added to a sum")
    one, other = exact(a), exact(b)

    def fits(one, other, starts) -> bool:
        wanted, magnitude = (dense(*of, starts, is_gradient) for of in ((one, other), (abs(one), abs(other))))
        error = np.abs(first.astype(np.float64) - wanted)
        return bool((error <= ACCUMULATION * magnitude + OUTPUT[dtype] * np.abs(wanted)).all())

    report.expect(group, fits(one, other, starts), label)
    if not starts[-1]:
        return
    controls = {"other numbers": fits(np.roll(one, 1, axis=0), other, starts)}
    sizes = np.diff(starts)
    if len({*sizes.tolist()}) > 1:
        controls["groups in another order"] = fits(one, other, np.cumsum([0, *sizes[::-1]]))
    if a.tile and b.shape[-1] > 128 and not is_gradient:
        controls["scales of other tiles"] = fits(
            one, exact(Fp8Array(b.values, np.roll(b.scale, 1, -1), b.tile)), starts
        )
    for name, unnoticed in controls.items():
        report.expect(f"{group}: control", not unnoticed, f"{label}: {name} are not noticed")


def check_what_is_behind(report: Report):
    """Rows after the last group become zeros, and add to no gradient, whatever they hold."""
    rng, starts = np.random.default_rng(1), jnp.int32([0, 128, 256])
    for tiled in (False, True):
        tiles = (LINE, SQUARE_OF_EACH, SQUARE) if tiled else (None,) * 3
        name = "behind the last group, 1d2d" if tiled else "behind the last group"
        a, b = operand(rng, (512, 256), tile=tiles[0]), operand(rng, (2, 272, 256), tile=tiles[1])
        x, dy = operand(rng, (256, 512), tile=tiles[0]), operand(rng, (272, 512), tile=tiles[2])

        def with_nan(array, rows):
            return Fp8Array(array.values.at[rows].set(jnp.nan), array.scale, array.tile)

        plain, broken = (
            twice_over_poison(jax.jit(grouped_matmul), given, b, starts)[0] for given in (a, with_nan(a, np.s_[256:]))
        )
        report.bits(name, broken, plain, "a product")
        report.expect(name, not plain[256:].astype(np.float32).any(), "rows of a product are zeros")
        report.expect(f"{name}: control", bool(plain[:256].astype(np.float32).any()), "the others are not")
        plain, broken = (
            twice_over_poison(jax.jit(grouped_weight_gradient), *given, starts)[0]
            for given in ((x, dy), (with_nan(x, np.s_[:, 256:]), with_nan(dy, np.s_[:, 256:])))
        )
        report.bits(name, broken, plain, "a gradient")


# ---- speed -----------------------------------------------------------------------------------------------------------

EXPERTS, ROWS = 8, 16_384
TIMED = ((4096, 14_336), (2048, 8192))  # k and n
SIZES = {"even": (2048,) * 8, "uneven": (6144, 3072, 2560, 1920, 1280, 896, 512, 0)}


def time_products(report: Report):
    """fprop, dgrad and wgrad, each next to one GEMM with as many multiplications."""
    for (k, n), by_tile in itertools.product(TIMED, (False, True)):
        dy = E4M3 if by_tile else E5M2
        line, square, each = (LINE, SQUARE, SQUARE_OF_EACH) if by_tile else (None,) * 3
        bf16, f32 = jnp.bfloat16, jnp.float32
        kinds = {  # operands of the groups, of one GEMM, the result, and how one GEMM accumulates
            "fprop": (((ROWS, k), E4M3), (EXPERTS, n, k), (n, k), bf16, "fast"),
            "dgrad": (((ROWS, n), dy), (EXPERTS, k, n), (k, n), bf16, "split"),
            "wgrad": (((k, ROWS), E4M3), (n, ROWS), (n, ROWS), f32, "split"),
        }
        for name, ((a_shape, a_dtype), b_shape, one_shape, dtype, accumulation) in kinds.items():
            is_gradient = name == "wgrad"
            product = grouped_weight_gradient if is_gradient else grouped_matmul
            b_dtype, b_tile = (dy, square) if is_gradient else (E4M3, each)
            a = timed_operand(0, a_shape, a_dtype, line)
            b, one = timed_operand(1, b_shape, b_dtype, b_tile), timed_operand(2, one_shape, b_dtype, square)
            seconds = seconds_per_call(
                lambda a, b, dtype=dtype, how=accumulation: matmul(a, b, dtype=dtype, accumulation=how), [(a, one)] * 2
            )
            label = f"{name}{', 1d2d' if by_tile else ''}"
            add_timing(report, f"one GEMM, {label}", k, n, seconds, seconds)
            for groups, sizes in SIZES.items():
                starts = jnp.asarray(np.cumsum([0, *sizes]), jnp.int32)
                grouped = seconds_per_call(
                    lambda a, b, starts, dtype=dtype, product=product: product(a, b, starts, dtype=dtype),
                    [(a, b, starts)] * 2,
                )
                add_timing(report, f"{groups} groups, {label}", k, n, grouped, seconds)


def add_timing(report, what, k, n, seconds, of_one):
    row = {"what": what, "shape": f"{ROWS} x {k} x {n}", "us": seconds * 1e6, "TFLOP/s": 2e-12 * ROWS * k * n / seconds}
    report.timings.append(row | {"of one GEMM's rate": of_one / seconds})


def timed_operand(seed, shape, dtype, tile) -> Fp8Array:
    values = jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16).astype(dtype)
    if tile is None:
        return Fp8Array(values, jnp.float32(0.01))
    return Fp8Array(values, jax.random.uniform(jax.random.key(seed), tiles_of(shape, tile), minval=0.5), tile)


def main(arguments: list[str] | None = None) -> int:
    checks = [check_products, check_what_is_behind]
    missing = next((name for name in TARGETS if name not in extension.TARGETS), TARGETS[0])
    return run_script(Script(__file__, __doc__, checks, [time_products], target=missing, self_test=True), arguments)


if __name__ == "__main__":
    sys.exit(main())

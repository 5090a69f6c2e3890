"""The block-scaled GEMM on a GPU: against float64, and then its speed next to one scale per tensor.

    python tests/gpu/tile_gemm_check.py --output tile_gemm_check.json      # a minute on an H200
    python tests/gpu/tile_gemm_check.py --self-test                        # the reference in its place, on a CPU

Every program runs twice, each time over memory filled with another pattern. Ends with one line per timing and per group
of checks, and with exit code 1 if a check failed.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu.kernel_check import E4M3, seconds_per_call, twice_over_poison
from gpu.report import Report, Script, on_gpu, run_script
from gpu.tile_check import spread

from jax_fp8.core.cast import LINE, SQUARE
from jax_fp8.core.fp8_array import Fp8Array, tiles_of
from jax_fp8.kernels.gemm import matmul

GEMM_SHAPES = ((256, 384, 512), (1000, 272, 400), (16, 16, 16), (18, 144, 2064), (1, 128, 256), (4096, 512, 1024))
GEMM_SHAPES += ((0, 16, 16),)
SCALINGS = {"1d2d": (LINE, SQUARE), "2d1d": (SQUARE, LINE), "1d1d": (LINE, LINE)}
# |d - exact| <= ACCUMULATION * sum|a||b| + OUTPUT * (|exact| + |bias| + |c|), as in kernel_check.py. Sums of 128
# products stay in the tensor cores, with some 13 bits beside the largest.
ACCUMULATION = 2.0**-11
OUTPUT = {jnp.bfloat16: 2.0**-8, jnp.float16: 2.0**-10, jnp.float32: 2.0**-22}


def operand(rng, shape, tile) -> Fp8Array:
    """Scales that are no powers of two, and differ from tile to tile."""
    values = jnp.asarray(rng.normal(size=shape) * 40, jnp.float32).astype(E4M3)
    scales = np.exp2(rng.uniform(-4, 4, tiles_of(shape, tile))).astype(np.float32) / 1024
    return Fp8Array(values, jnp.asarray(scales), tile)


def check_gemm(report: Report):
    rng = np.random.default_rng(0)
    addends = [(), ("bias",), ("c",), ("bias", "c")]
    for number, (name, tiles) in enumerate(SCALINGS.items()):
        shapes = GEMM_SHAPES if on_gpu() else GEMM_SHAPES[1:3]
        for shape_number, (m, n, k) in enumerate(shapes):
            a, b = operand(rng, (m, k), tiles[0]), operand(rng, (n, k), tiles[1])
            for dtype_number, dtype in enumerate(OUTPUT):
                some = addends if shape_number == 1 else [addends[(number + shape_number + dtype_number) % 4]]
                for wanted in some:
                    bias = jnp.asarray(rng.normal(size=n) * 10, jnp.bfloat16 if dtype == jnp.float32 else dtype)
                    arrays = {"bias": bias, "c": jnp.asarray(rng.normal(size=(m, n)) * 10, dtype)}
                    label = f"{name} {m, n, k} {jnp.dtype(dtype).name}"
                    check_product(report, label, a, b, dtype, {which: arrays[which] for which in wanted})
        a, b = operand(rng, (272, 400), tiles[0]), operand(rng, (656, 400), tiles[1])
        for columns in ((0, 256), (128, 400), (48, 304), (640, 16)):
            check_product(report, f"{name} columns {columns}", a, b, jnp.float32, {"columns": columns})
        check_product(report, f"{name} alpha", a, b, jnp.float32, {"alpha": 0.3})


def check_product(report: Report, label, a, b, dtype, options):
    run = jax.jit(lambda a, b: matmul(a, b, dtype=dtype, c_in_place=False, **options))
    first, second = twice_over_poison(run, a, b)
    report.bits("gemm", first, second, f"{label}: two runs")
    one, other = (np.asarray(x.values, np.float64) * spread(x.scale, x.shape, x.tile) for x in (a, b))
    columns = options.get("columns", (0, b.shape[0]))
    wanted = slice(columns[0], sum(columns))
    alpha = np.float32(options.get("alpha", 1))
    added = sum(np.asarray(options[name], np.float64) for name in ("bias", "c") if name in options)
    sizes = sum(np.abs(np.asarray(options[name], np.float64)) for name in ("bias", "c") if name in options)

    def fits(other) -> bool:
        product, magnitude = alpha * (one @ other.T)[:, wanted], alpha * (np.abs(one) @ np.abs(other).T)[:, wanted]
        bound = ACCUMULATION * magnitude + OUTPUT[dtype] * (np.abs(product) + sizes)
        return bool((np.abs(first - (product + added)) <= bound).all())

    report.expect("gemm", fits(other), f"{label} {sorted(options)}")
    if first.size and b.shape[1] > 128:
        moved = np.asarray(b.values, np.float64) * spread(np.roll(b.scale, 1, axis=1), b.shape, b.tile)
        report.expect("gemm: control", not fits(moved), f"{label}: scales of other tiles are not noticed")


# ---- speed -----------------------------------------------------------------------------------------------------------

TIMED = (  # m, n, k and the result: of layers 2,048 and 4,096 wide
    (16384, 2048, 2048, jnp.bfloat16),
    (16384, 6144, 2048, jnp.bfloat16),
    (16384, 8192, 2048, jnp.bfloat16),
    (16384, 2048, 8192, jnp.bfloat16),
    (2048, 8192, 16384, jnp.float32),
    (8192, 2048, 16384, jnp.float32),
    (8192, 16384, 4096, jnp.bfloat16),
    (8192, 4096, 16384, jnp.bfloat16),
    (4096, 16384, 8192, jnp.float32),
)


def time_gemms(report: Report):
    rng = np.random.default_rng(0)
    kinds = {"one scale, fast": (None, None), "one scale, split": (None, None)} | SCALINGS
    for m, n, k, dtype in TIMED:
        for name, tiles in kinds.items():
            a, b = (timed_operand(rng, shape, tile) for shape, tile in zip(((m, k), (n, k)), tiles, strict=True))
            how = {"dtype": dtype, "accumulation": "fast" if name.endswith("fast") else "split"}
            seconds = seconds_per_call(lambda a, b, how=how: matmul(a, b, **how), [(a, b)] * 4)
            row = {"what": name, "shape": f"{m} x {n} x {k} {jnp.dtype(dtype).name}", "us": seconds * 1e6}
            report.timings.append(row | {"TFLOP/s": 2e-12 * m * n * k / seconds})


def timed_operand(rng, shape, tile) -> Fp8Array:
    values = jax.random.normal(jax.random.key(rng.integers(2**31)), shape).astype(E4M3)
    if tile is None:
        return Fp8Array(values, jnp.float32(0.01))
    return Fp8Array(values, jnp.asarray(rng.uniform(0.5, 2, tiles_of(shape, tile)), jnp.float32), tile)


def main(arguments: list[str] | None = None) -> int:
    script = Script(__file__, __doc__, [check_gemm], [time_gemms], target="jax_fp8_gemm", self_test=True)
    return run_script(script, arguments)


if __name__ == "__main__":
    sys.exit(main())

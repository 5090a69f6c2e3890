"""Products of few rows on a GPU: against float64, and then their speed beside bfloat16 and cuBLASLt's FP8.

    python tests/gpu/few_rows_check.py --output few_rows_check.json      # under three minutes on an H100
    python tests/gpu/few_rows_check.py --search --only search_launches   # the fastest launches of each shape
    python tests/gpu/few_rows_check.py --self-test                       # the reference in its place, on a CPU

Every program runs twice, each time over memory filled with another pattern. Ends with one line per timing and per group
of checks, and with exit code 1 if a check failed. In the names of launches are the digits of csrc/few_rows_gemm.cu:
cluster, tiles of 16 rows for each warp, warps along n, and two of warps along k.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu.kernel_check import E4M3, IN_A_GRAPH, twice_over_poison
from gpu.report import Report, Script, on_gpu, run_script
from gpu.tile_check import spread

from jax_fp8.core.cast import LINE, SQUARE, Cast
from jax_fp8.core.fp8_array import Fp8Array, tiles_of
from jax_fp8.kernels import few_rows_gemm
from jax_fp8.kernels.activation_functions import activate
from jax_fp8.kernels.few_rows import FewRows, prepare_reference
from jax_fp8.kernels.few_rows_gemm import TARGET, call_few_rows, multiply_few_rows
from jax_fp8.kernels.gemm import matmul
from jax_fp8.kernels.gemm_parts import scales_as_read
from jax_fp8.kernels.norm import NormParameters
from jax_fp8.kernels.prepared_gemm import multiply_prepared

BF16 = jnp.bfloat16
# The dtype of a, and the tiles of a and of b.
PAIRS = {
    "one scale": (E4M3, None, None),
    "1d2d": (E4M3, LINE, SQUARE),
    "bfloat16": (BF16, None, None),
    "bfloat16, 2d": (BF16, None, SQUARE),
}
ROWS = (1, 2, 3, 8, 9, 16, 17, 33, 64)
SHAPES = ((16, 16), (48, 144), (272, 2064), (2048, 2048), (4096, 1040), (17408, 272))  # n, k
# |d - exact| <= ACCUMULATION * sum|a||b| + OUTPUT * (|exact| + |bias| + |c|), by the dtype of a. Warpgroups keep some
# 13 bits of the sum of 32 products of E4M3 and of the sum before them, four times in a row. Of 16 products of bfloat16,
# the tensor cores keep some 24, thousands of times along k.
ACCUMULATION = {E4M3: 2.0**-12, BF16: 2.0**-14}
OUTPUT = {jnp.bfloat16: 2.0**-8, jnp.float16: 2.0**-10, jnp.float32: 2.0**-22}


def operand(rng, shape, dtype, tile):
    """Scales that are no powers of two, and differ from tile to tile."""
    values = jnp.asarray(rng.normal(size=shape) * (1 if dtype == BF16 else 40), jnp.float32).astype(dtype)
    if dtype == BF16:
        return values
    scales = np.exp2(rng.uniform(-4, 4, tiles_of(shape, tile) if tile else ())) / 1024
    return Fp8Array(values, jnp.asarray(scales, jnp.float32), *([tile] if tile else []))


def numbers(x, shift=0) -> np.ndarray:
    """The values by their scales in float64; with a shift, by those of the next tiles along k."""
    if not isinstance(x, Fp8Array):
        return np.asarray(x, np.float64)
    if x.scale.ndim == 0:
        return np.asarray(x.values, np.float64) * np.float64(x.scale)
    return np.asarray(x.values, np.float64) * spread(np.roll(x.scale, shift, axis=1), x.shape, x.tile)


def check_products(report: Report):
    rng = np.random.default_rng(0)
    addends = [(), ("bias",), ("c",), ("bias", "c")]
    rows, shapes = (ROWS, SHAPES) if on_gpu() else (ROWS[::4], SHAPES[:3])
    for number, (pair, (dtype, of_a, of_b)) in enumerate(PAIRS.items()):
        for shape_number, (n, k) in enumerate(shapes):
            b = operand(rng, (n, k), E4M3, of_b)
            for m_number, m in enumerate(rows):
                turn = number + shape_number + m_number
                result = list(OUTPUT)[turn % 3]
                bias = jnp.asarray(rng.normal(size=n) * 10, BF16 if result == jnp.float32 else result)
                arrays = {"bias": bias, "c": jnp.asarray(rng.normal(size=(m, n)) * 10, result)}
                some = {which: arrays[which] for which in addends[turn // 2 % 4]}
                check_product(report, pair, operand(rng, (m, k), dtype, of_a), b, result, some)
        a, b = operand(rng, (5, 400), dtype, of_a), operand(rng, (656, 400), E4M3, of_b)
        for columns in ((0, 256), (128, 400), (640, 16), (48, 304)):
            if of_b is None or columns[0] % 128 == 0:
                check_product(report, f"{pair} columns {columns}", a, b, jnp.float32, {"columns": columns})
        check_product(report, f"{pair} alpha", a, b, jnp.float32, {"alpha": 0.3})


def check_product(report: Report, label, a, b, dtype, options):
    run = jax.jit(lambda a, b: multiply_few_rows(a, b, dtype=dtype, **options))
    first, second = twice_over_poison(run, a, b)
    label = f"{label} {a.shape[0], *b.shape} {jnp.dtype(dtype).name} {sorted(options)}"
    report.bits("few rows", first, second, f"{label}: two runs")
    columns = options.get("columns", (0, b.shape[0]))
    wanted, alpha = slice(columns[0], sum(columns)), np.float64(np.float32(options.get("alpha", 1)))
    added = [np.asarray(options[name], np.float64) for name in ("bias", "c") if name in options]

    def fits(shift) -> bool:
        one, other = numbers(a), numbers(b, shift)[wanted]
        product, magnitude = alpha * (one @ other.T), alpha * (np.abs(one) @ np.abs(other).T)
        sizes = np.abs(product) + sum(map(np.abs, added))
        error = np.abs(np.asarray(first, np.float64) - product - sum(added))
        return bool(
            (error <= ACCUMULATION[E4M3 if isinstance(a, Fp8Array) else BF16] * magnitude + OUTPUT[dtype] * sizes).all()
        )

    report.expect("few rows", fits(0), label)
    if b.scale.ndim > 0 and b.shape[1] > 128:
        report.expect("few rows: control", not fits(1), f"{label}: scales of other tiles are not noticed")


def check_nans(report: Report):
    """A NaN must come through to its row and its column, and to no others."""
    rng = np.random.default_rng(1)
    for pair, (dtype, of_a, of_b) in PAIRS.items():
        for m in (3, 20, 64):
            a, b = operand(rng, (m, 1040), dtype, of_a), operand(rng, (272, 1040), E4M3, of_b)
            values = (a.values if isinstance(a, Fp8Array) else a).at[2, 700].set(np.nan)
            a = Fp8Array(values, a.scale, *([of_a] if of_a else [])) if isinstance(a, Fp8Array) else values
            b = Fp8Array(b.values.at[200, 1039].set(np.nan), b.scale, *([of_b] if of_b else []))
            d = np.asarray(jax.jit(multiply_few_rows)(a, b), np.float32)
            wanted = np.zeros(d.shape, bool)
            wanted[2], wanted[:, 200] = True, True
            report.expect("NaN", np.array_equal(np.isnan(d), wanted), f"{pair}, {m} rows")


PREPARED = [(1, 6144, 2048), (3, 64, 272), (5, 2048, 8192), (8, 96, 1040), (33, 16384, 2048), (64, 28672, 4096)]
ACTIVATIONS = (None, "gelu", "swiglu", "squared_relu", "geglu", "silu")


def check_prepared(report: Report):
    """Norm, cast and activation inside of the kernel, against those of the reference around an exact product."""
    rng = np.random.default_rng(3)
    for number, (m, n, k) in enumerate(PREPARED if on_gpu() else PREPARED[1:2]):
        for norm_number, norm_name in enumerate(("", "layernorm", "rmsnorm")):
            for casts in (True, False):
                vectors = [jnp.asarray(rng.normal(size=k), jnp.float32) for _ in range(2)]
                bias = vectors[1] if norm_name == "layernorm" else None
                norm = NormParameters(vectors[0], bias) if norm_name else None
                cast = Cast.with_row(E4M3, jnp.float32([7.0, 0.011, 3.0]), 1) if casts else None
                rows = FewRows(jnp.asarray(rng.normal(size=(m, k)) * 3 + 1, BF16), cast, norm, 1e-6)
                if not rows.fits(few_rows_gemm.KERNEL_ROWS) or not (casts or norm_name):
                    continue
                activation = ACTIVATIONS[(number + norm_number + 3 * casts) % len(ACTIVATIONS)]
                dtype = (jnp.float32, BF16)[(number + casts) % 2]
                b = operand(rng, (n, k), E4M3, None)
                some = {"bias": jnp.asarray(rng.normal(size=n), BF16), "activation": activation}
                if activation is None:
                    some["c"] = jnp.asarray(rng.normal(size=(m, n)), dtype)
                some["dtype"] = dtype
                first, second = twice_over_poison(jax.jit(partial(multiply_prepared, **some)), rows, b)
                label = f"{m} x {k}, {n} rows of b, {norm_name}, {'cast' if casts else 'bfloat16'}, {activation}"
                report.bits("prepared", first, second, f"{label}: two runs")
                a = prepare_reference(rows.x, rows.scale if casts else None, norm, 1e-6)
                product = numbers(a) @ numbers(b).T + np.asarray(some["bias"], np.float64)
                if activation is None:
                    wanted = product + np.asarray(some["c"], np.float64)
                else:
                    wanted = np.asarray(activate(jnp.asarray(product, jnp.float32).astype(dtype), activation))
                wanted, got = np.asarray(wanted, np.float64), np.asarray(first, np.float64)
                error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
                bound = (1e-3 if casts else 2e-4) if dtype == jnp.float32 else 6e-3
                report.worst["prepared"] = max(error, report.worst.get("prepared", 0))
                report.expect("prepared", bool(error < bound), f"{label}: off by {error:.1e}")
                other = np.linalg.norm(got[::-1] - wanted) / np.linalg.norm(wanted)
                is_noticed = bool(other > bound or m == 1)
                report.expect("prepared: control", is_noticed, f"{label}: another row is not noticed")


def check_launches(report: Report):
    """Every launch of the search makes the product of the rule, but for the order of sums."""
    rng = np.random.default_rng(2)
    for m in (1, 16, 64) if on_gpu() else ():
        a, b = operand(rng, (m, 2064), E4M3, LINE), operand(rng, (2048, 2064), E4M3, SQUARE)
        wanted = np.asarray(multiply_few_rows(a, b, dtype=jnp.float32))
        bound = ACCUMULATION[E4M3] * (np.abs(numbers(a)) @ np.abs(numbers(b)).T)
        for config in launches(m, 2048, 2064):
            run = jax.jit(lambda a, b, config=config: own(a, b, None, config, jnp.float32))
            d = unless_too_large(lambda run=run, a=a, b=b: np.asarray(run(a, b)))
            if d is not None:
                report.expect("launches", bool((np.abs(d - wanted) <= bound).all()), f"{m} rows, {config}")


def unless_too_large(run: Callable):
    """What `run` returns; None if shared memory does not hold the launch."""
    try:
        return run()
    except jax.errors.JaxRuntimeError as error:
        if "no kernel runs with config" not in str(error):
            raise
    return None


# ---- speed -----------------------------------------------------------------------------------------------------------

TIMED_ROWS = (1, 8, 16, 32, 64)
# Of layers 2,048 and 4,096 wide: query, key and value, out, the two products of an MLP.
TIMED = ((6144, 2048), (2048, 2048), (8192, 2048), (2048, 8192))  # n, k
TIMED += ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
MORE_THAN_L2 = 160 << 20  # bytes of weights in a program: L2 of an H200 holds 60 MB


def own(a, b, c, config=0, dtype=BF16):
    """`multiply_few_rows` with a launch of one's own."""
    values, scale = (a.values, a.scale) if isinstance(a, Fp8Array) else (a, jnp.float32(1))
    scaling = ("" if scale.ndim == 0 else "1d") + ("" if b.scale.ndim == 0 else "2d")
    scales = [s if s.ndim == 0 else scales_as_read(s, x.tile) for s, x in ((scale, a), (b.scale, b))]
    how = {"dtype": dtype, "has_bias": False, "has_c": c is not None, "alpha": 1.0, "columns": None}
    operands = (values, b.values, *scales, *([] if c is None else [c]))
    return call_few_rows(*operands, scaling=scaling, config=config, **how)


def through_cublaslt(a, b, c):
    with mock.patch.object(few_rows_gemm, "has_few_rows", lambda *_: False):
        return matmul(a, b, c=c)


def seconds_of_chain(multiply: Callable, a, weights, c) -> float:
    """Median time of one product of a chain, each with other weights and with the result before it as its `c`: so none
    runs beside another, in a CUDA graph.
    """

    def chain(a, weights, c):
        for w in weights:
            c = multiply(a, w, c)
        return c

    program = jax.jit(chain, compiler_options=IN_A_GRAPH)
    for _ in range(3):
        jax.block_until_ready(program(a, weights, c))
    samples = []
    for _ in range(6):
        start = time.perf_counter()
        for _ in range(9):
            program(a, weights, c)
        jax.block_until_ready(program(a, weights, c))
        samples.append(time.perf_counter() - start)
    return statistics.median(samples) / 10 / len(weights)


def make_weights(n, k, dtype, tile=None) -> list:
    """As many matrices as exceed L2, each an array of its own: XLA would copy slices of one."""
    count = max(2, -(-MORE_THAN_L2 // (n * k)))
    make = jax.jit(lambda key: (0.05 * jax.random.normal(key, (n, k), BF16)).astype(dtype))
    matrices = [make(jax.random.key(i)) for i in range(count)]
    if dtype == BF16:
        return matrices
    scale = jnp.ones(tiles_of((n, k), tile)) if tile else jnp.float32(1)
    return [Fp8Array(values, scale, *([tile] if tile else [])) for values in matrices]


def activations(m, k, dtype, tile=None):
    values = jax.random.normal(jax.random.key(99), (m, k), BF16).astype(dtype)
    if dtype == BF16:
        return values
    return Fp8Array(values, jnp.ones(tiles_of((m, k), tile)), tile) if tile else Fp8Array(values, jnp.float32(1))


def add_row(report: Report, what, m, n, k, seconds, byte_count):
    row = {"what": what, "shape": f"{n} x {k}, {m} rows", "us": seconds * 1e6, "GB/s": byte_count / seconds * 1e-9}
    report.timings.append(row)


def time_products(report: Report):
    some = (1, 16, 64)
    for n, k in TIMED:
        for name, rows in {"one scale": TIMED_ROWS, "1d2d": some, "bfloat16": some}.items():
            dtype, of_a, of_b = PAIRS[name]
            weights = make_weights(n, k, E4M3, of_b)
            for m in rows:
                a, c = activations(m, k, dtype, of_a), jnp.zeros((m, n), BF16)
                add_row(report, f"few rows, {name}", m, n, k, seconds_of_chain(own, a, weights, c), n * k)
                if name == "one scale":
                    add_row(report, "cuBLASLt", m, n, k, seconds_of_chain(through_cublaslt, a, weights, c), n * k)
        weights = make_weights(n, k, BF16)
        for m in some:
            a, c = activations(m, k, BF16), jnp.zeros((m, n), BF16)
            seconds = seconds_of_chain(lambda a, w, c: c + jnp.einsum("mk,nk->mn", a, w), a, weights, c)
            add_row(report, "XLA bfloat16", m, n, k, seconds, 2 * n * k)


def launches(m, n, k) -> Iterator[int]:
    """Launches that may suit a shape: 4 to 16 warps, and up to four blocks for each of 132 multiprocessors."""
    for tiles in (1, 2) if m <= 16 else (2,):
        for row_warps in (1, 2, 4):
            for depth_warps in (1, 2, 4, 8, 16):
                warps, block_rows = row_warps * depth_warps, 16 * tiles * row_warps
                if not 4 <= warps <= (16 if m <= 16 else 8) or (warps == 16 and tiles == 2):
                    continue
                for cluster in (1, 2, 4, 8):
                    blocks = -(-n // block_rows) * cluster
                    if 92 <= blocks <= 528 and -(-k // 128) >= cluster * depth_warps:
                        yield ((cluster * 10 + tiles) * 10 + row_warps) * 100 + depth_warps


def search_launches(report: Report):
    """The fastest launches of each shape, beside that of the rule, but for those that shared memory cannot hold."""
    for n, k in TIMED:
        weights = make_weights(n, k, E4M3)
        for m in (1, 8, 16, 64):
            a, c, found = activations(m, k, E4M3), jnp.zeros((m, n), BF16), {}
            for config in (0, *launches(m, n, k)):
                multiply = partial(own, config=config)
                seconds = unless_too_large(partial(seconds_of_chain, multiply, a, weights, c))
                if seconds is not None:
                    found[config] = seconds
            for config in (0, *sorted(found, key=found.get)[:3]):
                add_row(report, f"launch {config or 'of the rule'}", m, n, k, found[config], n * k)
                print(report.timings[-1], flush=True)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    searches = "--search" in arguments
    timings = [time_products, search_launches] if searches else [time_products]
    checks = [check_products, check_nans, check_prepared, check_launches]
    script = Script(__file__, __doc__, checks, timings, target=TARGET, self_test=True)
    return run_script(script, [argument for argument in arguments if argument != "--search"])


if __name__ == "__main__":
    sys.exit(main())

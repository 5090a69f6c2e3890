"""The kernels of norms on a GPU: against NumPy in float64, bit for bit from their own statistics, and then speed.

    python tests/gpu/norm_check.py --output norm_check.json      # a few minutes on an H200
    python tests/gpu/norm_check.py --self-test                   # the reference in the kernels' place, on a CPU

A row's mean and deviation depend on the order of a sum, by an ulp or two. Everything computed from them does not, and
is compared byte for byte. Every program runs twice, each time over memory filled with another pattern, and must give
the same bytes. Ends with one line per timing and per group of checks, and with exit code 1 if a check failed.
"""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

import reference
from gpu.kernel_check import (
    E4M3,
    E5M2,
    IN_A_GRAPH,
    SOURCES,
    seconds_per_call,
    twice_over_poison,
)
from gpu.report import Report, Script, as_bytes, on_gpu, run_script

from jax_fp8.core.cast import Cast
from jax_fp8.core.scale import ScaleFormula
from jax_fp8.kernels.norm import (
    NormParameters,
    NormStatistics,
    norm_amax,
    norm_backward,
    norm_quantize,
    normalize,
    normalize_backward,
)
from jax_fp8.kernels.quantize import quantize_transpose

EPSILON = 1e-5
SCALE = np.float32(0.0123)
NORMS = ("layernorm", "rmsnorm")
FEATURES = (16, 48, 528, 1000, 1024, 2048, 3088, 4096, 8192, 12288, 16384)
ROWS = (16, 33, 272)
LONG = (((4112, 2048), jnp.bfloat16), ((2064, 4096), jnp.bfloat16), ((3, 65537), jnp.float32), ((4097, 3), jnp.float16))
LONG += (((16, 32768), jnp.bfloat16), ((17, 40000), jnp.float32), ((1, 8), jnp.float32), ((0, 64), jnp.bfloat16))
SMALL = (((16, 16), jnp.bfloat16), ((33, 48), jnp.float16), ((48, 208), jnp.float32), ((5, 3), jnp.bfloat16))

TIMED = ((16384, 2048), (8192, 4096))

STATISTICS = 1e-6  # relative error of mean and deviation; more where many terms are added up
CANCELLED = 1e-5  # absolute, where an element, of order one, and its bias almost cancel: steps are small there
SAME = 0.99  # the least share of elements that float32 and float64 round the same way
SUMS = 1e-5  # relative norm of the error of dscale and dbias
GRADIENT = {jnp.float32: 1e-5, jnp.bfloat16: 3e-3, jnp.float16: 4e-4}  # of dx: one rounding


def draw(seed, shape, dtype, mean=0.5) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape, np.float32) + np.float32(mean)).astype(dtype)


def parameters(norm, n) -> NormParameters:
    return NormParameters(draw(7, n, np.float32, 1.0), draw(8, n, np.float32) if norm == "layernorm" else None)


def cases():
    """Shapes and dtypes: on a CPU few and small ones."""
    if not on_gpu():
        return SMALL
    return [((rows, n), dtype) for n in FEATURES for rows in ROWS for dtype in SOURCES] + list(LONG)


# ---- the oracle ------------------------------------------------------------------------------------------------------


def statistics_of(x, norm):
    """Mean (0 for RMSNorm) and 1 / deviation, float64."""
    x = x.astype(np.float64)
    mean = x.mean(axis=1, keepdims=True) if norm.bias is not None else np.zeros((x.shape[0], 1))
    return mean, 1 / np.sqrt(np.square(x - mean).mean(axis=1, keepdims=True) + np.float32(EPSILON))


def is_near(statistic, exact, n, absolute=0.0) -> bool:
    """Whether a statistic of rows of `n` elements is as near as sums in float32 allow.

    A lane of the kernel for any shape, and of the one for wide rows, adds n / 32 squares one after another. Squares of
    bfloat16 lie on a grid, and the halves among them are rounded the same way, so that the error grows with their
    number. At worst 1 / deviation is off by n / 32 half units of 2**-24; in the kernel's order NumPy finds up to 0.04
    units of n / 32, and 0.06 are allowed.
    """
    relative = max(STATISTICS, n / 32 * 2**-24 / 16)
    return bool(np.allclose(statistic, exact, rtol=relative, atol=absolute))


def normalized(x, norm, mean, rstd):
    """From given statistics: float32 after every operation, but scale and bias applied with one rounding."""
    with np.errstate(all="ignore"):
        centered = x.astype(np.float32) - (np.float32(0) if mean is None else mean)
        y = (centered * rstd).astype(np.float64) * norm.scale + (-0.0 if norm.bias is None else norm.bias)
        return y.astype(np.float32).astype(x.dtype)


def gradients_of(dy, x, norm, residual, mean, rstd):
    """dx, dscale and dbias (or None), float64."""
    dy, y = dy.astype(np.float64), (x.astype(np.float64) - mean) * rstd
    g = dy * norm.scale
    dx = g - y * np.mean(g * y, axis=1, keepdims=True)
    dx = dx if norm.bias is None else dx - np.mean(g, axis=1, keepdims=True)
    dx = dx * rstd + (0 if residual is None else residual.astype(np.float64))
    return dx, np.sum(dy * y, axis=0), None if norm.bias is None else np.sum(dy, axis=0)


def steps_apart(got, wanted) -> np.ndarray:
    """How many FP8 numbers lie between two."""
    number = [as_bytes(x).astype(np.int16) for x in (got, wanted)]
    return np.abs(np.subtract(*(np.where(n < 128, n, 128 - n) for n in number)))


def relative(got, wanted) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - wanted) / max(np.linalg.norm(wanted), 1e-30))


# ---- forward ---------------------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames="dtype")
def forward(x, norm, scale, dtype):
    """All calls for one x."""
    quantize = partial(norm_quantize, x, norm, EPSILON, Cast.with_scale(dtype, scale))
    both, (rowwise, _), (columnwise, _) = (quantize(orientations=which) for which in ("both", "rowwise", "columnwise"))
    return both, rowwise.rowwise, columnwise.columnwise, norm_amax(x, norm, EPSILON)


def check_values(report: Report, label, x, norm, got, dtype):
    """Values of one call against its own statistics, and against float64."""
    (pair, statistics), rowwise, columnwise, measured = got
    values, amax = pair.rowwise, pair.amax
    report.bits("transposed", pair.columnwise.values, np.asarray(values.values).T, label)
    report.bits("one orientation", rowwise.values, values.values, f"rowwise {label}")
    report.bits("one orientation", columnwise.values, pair.columnwise.values, f"columnwise {label}")
    report.bits("norm_amax", measured, amax, label)
    report.bits("the scale handed on", values.scale, SCALE, label)
    mean, rstd = statistics_of(x, norm)
    report.expect("statistics", is_near(statistics.rstd, rstd, x.shape[1]), f"rstd of {label}")
    if norm.bias is not None:
        near = is_near(statistics.mean, mean, x.shape[1], absolute=STATISTICS)
        report.expect("statistics", near, f"mean of {label}")
    if on_gpu():
        y = normalized(x, norm, statistics.mean, statistics.rstd)
        report.bits("values from the kernel's statistics", values.values, reference.quantize(y, dtype, SCALE)[0], label)
        report.bits("amax from the kernel's statistics", amax, reference.amax(y), label)
    y = normalized(x, norm, mean.astype(np.float32), rstd.astype(np.float32))
    wanted = reference.quantize(y, dtype, SCALE)[0]
    apart = steps_apart(values.values, wanted)
    distance = np.abs(np.asarray(values.values, np.float32) - wanted.astype(np.float32)).reshape(-1) * SCALE
    far = int(np.sum((apart > 1) & (distance > CANCELLED)))
    same = float(np.mean(apart == 0)) if apart.size else 1.0
    what = f"{label}: {same:.4f} are the same, {far} far away"
    report.expect("values from float64", same >= SAME and far == 0, what)


def check_quantize(report: Report):
    for name in NORMS:
        for number, (shape, source) in enumerate(cases()):
            x, norm = draw(number, shape, source), parameters(name, shape[1])
            for dtype in (E4M3, E5M2):
                label = f"{name} {jnp.dtype(source).name}{list(shape)} to {jnp.dtype(dtype).name}"
                runs = twice_over_poison(forward, x, norm, SCALE, dtype)
                same = all(
                    np.array_equal(*map(as_bytes, pair)) for pair in zip(*map(jax.tree.leaves, runs), strict=True)
                )
                report.expect("two runs, the same bytes", same, label)
                check_values(report, label, x, norm, runs[0], dtype)


def check_forward_controls(report: Report):
    """Negative controls: without a bias, a scale, a rounding or a column the comparison fails."""
    x, norm = draw(1, (64, 2048), jnp.bfloat16), parameters("layernorm", 2048)
    (pair, statistics), *_ = jax.tree.map(np.asarray, forward(x, norm, SCALE, E4M3))
    given = statistics.mean, statistics.rstd
    wrong = {
        "no bias": normalized(x, NormParameters(norm.scale, None), *given),
        "no scale": normalized(x, NormParameters(np.ones_like(norm.scale), norm.bias), *given),
        "no mean": normalized(x, norm, None, statistics.rstd),
        "not rounded": normalized(x.astype(np.float32), norm, *given),
    }
    for what, y in wrong.items():
        differ = float(np.mean(steps_apart(pair.rowwise.values, reference.quantize(y, E4M3, SCALE)[0]) != 0))
        report.expect("controls of values", differ > 1e-3, f"{what}: only {differ:.1e} of the values change")
    for n in (2048, 32768):
        x, norm = draw(1, (16, n), jnp.bfloat16), parameters("layernorm", n)
        exact, without = statistics_of(x, norm), statistics_of(x[:, 1:], norm)
        noticed = not any(is_near(wrong, right, n) for wrong, right in zip(without, exact, strict=True))
        report.expect("controls of statistics", noticed, f"one column fewer of {n}")


def check_special_values(report: Report):
    """Rows of NaNs, infinities, huge or equal numbers change no other row; the amax is NaN."""
    for shape in ((64, 2048), (33, 100)):
        for name in NORMS:
            x, norm = draw(2, shape, jnp.float32), parameters(name, shape[1])
            clean, _ = jax.tree.map(np.asarray, forward(x, norm, SCALE, E4M3)[0])
            x[1], x[5, 3], x[9, 0], x[13], x[20, 1] = 0, np.nan, np.inf, 7.5, 1e30
            pair, statistics = jax.tree.map(np.asarray, forward(x, norm, SCALE, E4M3)[0])
            values, transposed, _, amax = pair.arrays
            label, others = f"{name} {list(shape)}", np.delete(np.arange(shape[0]), [1, 5, 9, 13, 20])
            report.bits("special values", values[others], clean.rowwise.values[others], f"other rows of {label}")
            report.bits("special values", transposed, values.T, f"transpose of {label}")
            bytes_of_nan = np.full(shape[1], 0x7F, np.uint8)
            report.bits("special values", values[5], bytes_of_nan, f"NaN of {label}")
            if on_gpu():
                y = normalized(x, norm, statistics.mean, statistics.rstd)
                report.bits("special values", values, reference.quantize(y, E4M3, SCALE)[0], f"all of {label}")
                report.bits("special values", amax, reference.amax(y), f"amax of {label}")


def check_current_scaling(report: Report):
    x, norm = draw(3, (272, 1024), jnp.bfloat16), parameters("layernorm", 1024)

    @jax.jit
    def run(x):
        amax = norm_amax(x, norm, EPSILON)
        pair, _ = norm_quantize(x, norm, EPSILON, Cast.from_amax(E4M3, amax, ScaleFormula()))
        return pair.rowwise, amax

    for quantized, amax in twice_over_poison(run, x):
        report.bits("current scaling", quantized.scale, reference.current_scale(amax, E4M3), "its scale")
        largest = np.max(np.abs(quantized.values.astype(np.float32)))
        report.expect("current scaling", largest == 448, f"the largest is {largest} instead of 448")


# ---- backward --------------------------------------------------------------------------------------------------------


def check_backward(report: Report):
    run = jax.jit(norm_backward)
    for name in NORMS:
        for number, (shape, source) in enumerate(cases()):
            x, dy, residual = (draw(3 * number + i, shape, source) for i in range(3))
            norm = parameters(name, shape[1])
            exact = [array.astype(np.float32) for array in statistics_of(x, norm)]
            statistics = NormStatistics(exact[0] if norm.bias is not None else None, exact[1])
            for added in (None, residual):
                label = f"{name} {jnp.dtype(source).name}{list(shape)} {'plain' if added is None else 'with residual'}"
                runs = twice_over_poison(run, dy, x, norm, statistics, added)
                same = all(
                    np.array_equal(*map(as_bytes, pair)) for pair in zip(*map(jax.tree.leaves, runs), strict=True)
                )
                report.expect("two runs, the same bytes", same, label)
                check_gradients(report, label, runs[0], gradients_of(dy, x, norm, added, *exact), source)


def gradient_errors(got, wanted, source) -> dict[str, bool]:
    """Which gradients are right."""
    dx, sums = got
    close = {"dx": relative(dx, wanted[0]) <= GRADIENT[source] if dx.size and np.any(wanted[0]) else True}
    if source != jnp.float32 and dx.size > 1000:
        close["dx, rounded"] = bool(np.mean(dx == wanted[0].astype(source)) >= SAME)
    for what, array, expected in (("dscale", sums.scale, wanted[1]), ("dbias", sums.bias, wanted[2])):
        if array is not None:
            size = np.linalg.norm(expected)
            close[what] = bool(np.linalg.norm(array - expected) <= SUMS * max(size, 1e-3))
    return close


def check_gradients(report: Report, label, got, wanted, source):
    for what, close in gradient_errors(got, wanted, source).items():
        report.expect(f"backward: {what}", close, label)


def check_backward_controls(report: Report):
    """Negative controls: a gradient without one of its parts fails."""
    x, dy, residual = (draw(i, (64, 2048), jnp.bfloat16) for i in range(3))
    norm = parameters("layernorm", 2048)
    exact = [array.astype(np.float32) for array in statistics_of(x, norm)]
    got = jax.tree.map(np.asarray, jax.jit(norm_backward)(dy, x, norm, NormStatistics(*exact), residual))
    right = gradients_of(dy, x, norm, residual, *exact)
    wrong = {
        "no residual": ("dx", gradients_of(dy, x, norm, None, *exact)),
        "rmsnorm": ("dx", gradients_of(dy, x, NormParameters(norm.scale, None), residual, *exact)[:2] + right[2:]),
        "one row fewer": ("dscale", (right[0], right[1] - (dy * x)[0].astype(np.float64), right[2])),
        "no bias": ("dbias", (*right[:2], right[2] * 0)),
    }
    report.expect("controls of gradients", all(gradient_errors(got, right, jnp.bfloat16).values()), "the right ones")
    for what, (caught_by, gradients) in wrong.items():
        caught = not gradient_errors(got, gradients, jnp.bfloat16)[caught_by]
        report.expect("controls of gradients", caught, f"{what} is not noticed")


# ---- size, graphs ----------------------------------------------------------------------------------------------------


def check_many_elements(report: Report):
    """More than 2**31 elements: the last rows are the same as alone, and so are sums to which others add zeros."""
    if not on_gpu():
        return
    for rows, n in ((2**20 + 48, 2048), (2**20 + 33, 2056)):  # vectors, and one element at a time
        last = rows // 16 * 16 - 16
        kept, norm = np.r_[0:16, last:rows], parameters("layernorm", n)
        ends = jnp.asarray(draw(5, (len(kept), n), jnp.bfloat16))
        x = jnp.zeros((rows, n), jnp.bfloat16).at[kept].set(ends)
        cast = Cast.with_scale(E4M3, SCALE)
        pair, statistics = jax.jit(lambda x: norm_quantize(x, norm, EPSILON, cast))(x)  # noqa: B023
        alone, statistics_alone = forward(ends, norm, SCALE, E4M3)[0]
        label = f"[{rows}, {n}]"
        values, transposed, _, amax = pair.arrays
        report.bits("over 2**31 elements", values[kept], alone.rowwise.values, f"values of {label}")
        report.bits("over 2**31 elements", transposed[:, kept], alone.columnwise.values, f"transpose of {label}")
        report.bits("over 2**31 elements", statistics.rstd[kept], statistics_alone.rstd, f"rstd of {label}")
        report.expect("over 2**31 elements", float(amax) >= float(alone.amax), f"amax of {label}")
        del pair, values, transposed
        dx, sums = jax.jit(norm_backward)(x, x, norm, statistics, x)
        dx_alone, sums_alone = jax.jit(norm_backward)(ends, ends, norm, statistics_alone, ends)
        report.bits("over 2**31 elements", dx[kept], dx_alone, f"dx of {label}")
        for got, wanted in ((sums.scale, sums_alone.scale), (sums.bias, sums_alone.bias)):
            report.expect(
                "over 2**31 elements", relative(np.asarray(got), np.asarray(wanted)) < SUMS, f"sums of {label}"
            )
        del dx, x


def check_graphs(report: Report):
    """A CUDA graph, captured and replayed, gives the same bytes as a run without one."""
    if not on_gpu():
        return
    norm = parameters("layernorm", 2048)

    def chain(x, dy):
        cast = Cast.from_amax(E4M3, norm_amax(x, norm, EPSILON), ScaleFormula())
        pair, statistics = norm_quantize(x, norm, EPSILON, cast)
        return pair, statistics, norm_backward(dy, x, norm, statistics, dy)

    captured = jax.jit(chain, compiler_options=IN_A_GRAPH)
    plain = jax.jit(chain, compiler_options={"xla_gpu_enable_command_buffer": ""})
    for run in range(5):
        x, dy = (jnp.asarray(draw(10 * run + i, (272, 2048), jnp.bfloat16)) for i in range(2))
        for got, wanted in zip(*map(jax.tree.leaves, (captured(x, dy), plain(x, dy))), strict=True):
            report.bits("CUDA graph", got, wanted, f"run {run}")


def check_refusals(report: Report):
    """Every call that breaks the contract raises, and the message names operation and argument."""
    if not on_gpu():
        return
    x, scales, rstd = jnp.ones((32, 64), jnp.bfloat16), jnp.ones(64), jnp.ones((32, 1))
    nothing, one = jnp.zeros((0, 0)), jnp.float32(1)
    origin = {"row": np.int32(0), "from_amax": False, "margin": np.int32(0)}
    origin |= {"amax_epsilon": np.float32(0), "power_2_scale": False}

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    def quantize(values=(32, 64), values_t=(64, 32), mean=(0, 0)):
        results = [
            array(*values, dtype=E4M3),
            array(*values_t, dtype=E4M3),
            array(),
            array(),
            array(*mean),
            array(32, 1),
        ]
        return partial(jax.ffi.ffi_call("jax_fp8_norm_quantize", results), epsilon=np.float32(1), **origin)

    def backward(dx=(32, 64), dbias=0, partials=(4, 64)):
        results = [array(*dx, dtype=jnp.bfloat16), array(64), array(dbias), array(*partials), array(0, 0)]
        return jax.ffi.ffi_call("jax_fp8_norm_backward", results)

    none, no_residual = jnp.zeros(0), jnp.zeros((0, 0), jnp.bfloat16)
    cases = [
        (quantize(), (x, one, scales[1:], none), "norm_scale must have shape [64]"),
        (quantize(), (x, one, scales, scales[1:]), "norm_bias must have shape [64]"),
        (quantize(values=(64, 32)), (x, one, scales, none), "values must have shape [32, 64]"),
        (quantize(values_t=(32, 64)), (x, one, scales, none), "values_t must have shape [64, 32]"),
        (quantize(mean=(64, 1)), (x, one, scales, scales), "mean must have shape [32, 1]"),
        (quantize(), (x.astype(jnp.int32), one, scales, none), "x must be float32"),
        (backward(), (x[1:], x, no_residual, scales, nothing, rstd), "dy must have shape [32, 64]"),
        (backward(), (x, x, x[1:], scales, nothing, rstd), "residual must have shape [32, 64]"),
        (backward(), (x, x, no_residual, scales, nothing, rstd[1:]), "rstd must have shape [32, 1]"),
        (backward(), (x, x, no_residual, scales, rstd, rstd), "dbias must have shape [64]"),
        (backward(partials=(0, 64)), (x, x, no_residual, scales, nothing, rstd), "have at least one row"),
    ]
    for call, args, fragment in cases:
        try:
            jax.block_until_ready(jax.jit(call)(*args))
            report.expect("refusals", False, f"nothing was raised where {fragment!r} was due")
        except jax.errors.JaxRuntimeError as error:
            known = fragment in str(error) and "jax_fp8_norm" in str(error)
            report.expect("refusals", known, f"{fragment!r} is not in: {error}")


# ---- speed -----------------------------------------------------------------------------------------------------------


def copy_rate(bytes_moved) -> float:
    """Bytes per second of an operation that reads as many bytes as it writes, together `bytes_moved`."""
    batches = [(jax.random.bits(jax.random.key(i), (bytes_moved // 8,), jnp.uint32),) for i in range(8)]
    return bytes_moved / seconds_per_call(lambda x: x ^ jnp.uint32(1), batches)


def separate_quantize(x, norm, scale):
    y, statistics = normalize(x, norm, EPSILON, x.dtype)
    return quantize_transpose(y, Cast.with_scale(E4M3, scale)), statistics


def separate_backward(dy, x, norm, statistics, residual):
    dx, sums = normalize_backward(dy, x, norm, statistics)
    return jax.lax.optimization_barrier(dx) + residual, sums  # JAX adds where the stream forks, in a pass of its own


def time_norms(report: Report):
    for shape in TIMED:
        size = int(np.prod(shape))
        copies = {width: copy_rate(size * width) for width in (2, 4, 8)}
        for name in NORMS:
            norm = jax.device_put(parameters(name, shape[1]))
            xs = [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(12)]
            statistics = [normalize(x, norm, EPSILON, x.dtype)[1] for x in xs]
            forwards = [(x, norm, SCALE) for x in xs]
            backwards = [(xs[i - 1], xs[i], norm, statistics[i], xs[i - 2]) for i in range(12)]
            calls = (
                ("norm_quantize", 4, quantize, forwards),
                ("  columnwise only", 3, partial(quantize, orientations="columnwise"), forwards),
                ("  separate operations", 4, separate_quantize, forwards),
                ("norm_amax", 2, lambda x, norm, scale: norm_amax(x, norm, EPSILON), forwards),
                ("norm_backward", 8, norm_backward, backwards),
                ("  separate operations", 8, separate_backward, backwards),
            )
            for what, width, call, batches in calls:
                seconds = seconds_per_call(call, batches)
                rate = size * width / seconds
                row = {
                    "what": f"{name} {what}",
                    "shape": f"bfloat16{list(shape)}",
                    "us": seconds * 1e6,
                    "GB/s": rate / 1e9,
                }
                report.timings.append(row | {"share of copy": rate / copies.get(width, copies[4])})


def quantize(x, norm, scale, orientations="both"):
    return norm_quantize(x, norm, EPSILON, Cast.with_scale(E4M3, scale), orientations=orientations)


CHECKS = [check_quantize, check_forward_controls, check_special_values, check_current_scaling, check_backward]
CHECKS += [check_backward_controls, check_many_elements, check_graphs, check_refusals]


def main(arguments: list[str] | None = None) -> int:
    script = Script(__file__, __doc__, CHECKS, [time_norms], target="jax_fp8_norm_backward", self_test=True)
    return run_script(script, arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Every kernel on a GPU: bit for bit against NumPy, the GEMM against float64, refusals, CUDA graphs, and then speed.

    python tests/gpu/kernel_check.py --output kernel_check.json      # under two minutes on an H200

It makes the custom calls itself, so that no Python code of the library can hide a wrong byte. Every program runs twice,
and each time memory is filled with another pattern before, so a byte that no kernel writes is found. Ends with one line
per timing and per group of checks, and with exit code 1 if a check failed.
"""

import functools
import itertools
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

import reference
from gpu.report import Report, Script, run_script

from jax_fp8.kernels.quantize import sums_results
from jax_fp8.kernels.take_rows import take_rows_of_fp8
from jax_fp8.tune.gemm_bench import OFF_THE_LIST

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
SOURCES = (jnp.bfloat16, jnp.float16, jnp.float32)
SCALES = (1.0, 2.0**-126, 3.0e38, 0.1, 7.3e-3, 1 / 3, 448.0, 2.0**-9, 1.1754945e-37, 123456.7)
SHAPES = ((1, 1), (1, 16), (16, 1), (15, 17), (16, 16), (128, 128), (129, 127), (144, 272), (1000, 3000), (4096, 1040))
SHAPES += ((2048, 8192), (3, 65537), (65537, 3), (0, 16), (16, 0), (80, 48), (64, 16), (16, 4096), (4096, 16))
TRANSPOSE_TIMED = ((16384, 2048), (16384, 8192), (32768, 2048), (2048, 8192))
GEMM_SHAPES = ((16, 16, 16), (32, 48, 64), (17, 32, 48), (1, 16, 16), (0, 16, 16))  # m, n, k
GEMM_SHAPES += ((1000, 144, 272), (4096, 512, 1024), (208, 1040, 4112))
CANDIDATE_SHAPES = ((16, 16, 16), (1024, 768, 512), (2048, 512, 4096))
CANDIDATES = 16
WORKSPACE = jax.ShapeDtypeStruct((2**25,), jnp.uint8)
AMAX = SCALE = jax.ShapeDtypeStruct((), jnp.float32)
SCALAR = np.float32

# How a kernel gets its scale: the source's element at row 0 is the scale, or an amax for one of the rules below.
GIVEN = {"row": np.int32(0), "from_amax": False, "margin": np.int32(0)}
GIVEN |= {"amax_epsilon": SCALAR(0), "power_2_scale": False}
FROM_AMAX = GIVEN | {"from_amax": True}
RULES = (
    {},
    {"power_2_scale": True},
    {"amax_epsilon": SCALAR(1e-3)},
    {"amax_epsilon": SCALAR(0.7), "power_2_scale": True},
)
RULES += tuple({"margin": np.int32(margin)} for margin in (2, -3, 120, 126, -126))

# |d - exact| <= ACCUMULATION * sum|a||b| + OUTPUT * (|exact| + |bias| + |c|). Hopper's tensor cores keep about 13
# fraction bits relative to the largest partial sum; split accumulation moves sums to float32 as it goes and loses less.
ACCUMULATION = {True: 2.0**-10, False: 2.0**-12}
OUTPUT = {jnp.bfloat16: 2.0**-8, jnp.float16: 2.0**-10, jnp.float32: 2.0**-22}


# The whole program as one CUDA graph, however few its kernels.
IN_A_GRAPH = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL",
    "xla_gpu_graph_min_graph_size": 1,
}


def scale_by(rule, amax, dtype):
    """The expected scale, by one of RULES, of an amax or of each amax of an array."""
    return (reference.scale_from_amax if "margin" in rule else reference.current_scale)(amax, dtype, **rule)


# ---- calling the kernels ---------------------------------------------------------------------------------------------


def quantize(x, source, dtype, **how):
    results = jax.ShapeDtypeStruct(x.shape, dtype), AMAX, SCALE
    return jax.ffi.ffi_call("jax_fp8_quantize", results)(x, source, **GIVEN | how)


def quantize_transpose(x, source, dtype, **how):
    results = jax.ShapeDtypeStruct(x.shape, dtype), jax.ShapeDtypeStruct(x.shape[::-1], dtype), AMAX, SCALE
    return jax.ffi.ffi_call("jax_fp8_quantize_transpose", results)(x, source, **GIVEN | how)


def quantize_side_by_side(parts, source, dtype):
    shape = parts[0].shape[0], sum(part.shape[1] for part in parts)
    matrices = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[::-1], dtype)
    call = jax.ffi.ffi_call("jax_fp8_quantize_transpose_sums", (*matrices, AMAX, SCALE, *sums_results(shape)))
    return call(parts[0], source, *parts[1:], **GIVEN)[:-1]


def transpose(x):
    return jax.ffi.ffi_call("jax_fp8_transpose", jax.ShapeDtypeStruct(x.shape[::-1], x.dtype))(x)


def amax(*arrays):
    return jax.ffi.ffi_call("jax_fp8_amax", AMAX)(*arrays)


def gemm(
    a,
    b,
    a_scale,
    b_scale,
    *addends,
    dtype,
    has_bias=False,
    has_c=False,
    fast=True,
    alpha=1,
    in_place=True,
    candidate=0,
    columns=None,
):
    operands = (a, b, a_scale, b_scale, *addends)
    first, count = columns or (0, b.shape[0])
    call = jax.ffi.ffi_call(
        "jax_fp8_gemm",
        (jax.ShapeDtypeStruct((a.shape[0], count), dtype), WORKSPACE),
        input_output_aliases={len(operands) - 1: 0} if has_c and in_place else None,
    )
    flags = {"has_bias": has_bias, "has_c": has_c, "fast_accumulation": fast}
    flags |= {
        "alpha": np.float32(alpha),
        "first_column": np.int64(first),
        "candidate": np.int32(candidate),
        "scaling": "",
    }
    return call(*operands, **flags)[0]


def twice_over_poison(function, *args):
    """Results of two runs. Before each, another pattern fills the memory that the results may reuse."""
    runs = []
    for pattern in (0xA5, 0x5A):
        poison = [jnp.full((64 << 20,), pattern, jnp.uint8), jnp.full((8 << 20,), pattern, jnp.uint8)]
        poison += [jnp.full((size,), pattern, jnp.uint8) for size in (256, 4096, 65536, 1 << 20)]
        jax.block_until_ready(poison)
        del poison
        runs.append(jax.tree.map(np.asarray, function(*args)))
    return runs


# ---- correctness -----------------------------------------------------------------------------------------------------


def check_matrix(report: Report, group: str, x: np.ndarray, scales):
    """All three kernels and both formats on one matrix."""

    @jax.jit
    def run(x, scale):
        casts = [(quantize(x, scale, dtype), quantize_transpose(x, scale, dtype)) for dtype in (E4M3, E5M2)]
        return casts, amax(x)

    wanted_amax = reference.amax(x)
    for scale in map(SCALAR, scales):
        wanted = {dtype: reference.quantize(x, dtype, scale)[0] for dtype in (E4M3, E5M2)}
        for casts, measured in twice_over_poison(run, x, scale):
            name = f"{x.dtype}{list(x.shape)} scale {scale}"
            report.bits(group, measured, wanted_amax, f"amax of {name}")
            for dtype, (plain, transposing) in zip((E4M3, E5M2), casts, strict=True):
                (values, plain_amax, plain_scale), (both, transposed, both_amax, both_scale) = plain, transposing
                label = f"{jnp.dtype(dtype).name} of {name}"
                report.bits(group, values, wanted[dtype], f"quantize to {label}")
                report.bits(group, both, wanted[dtype], f"quantize_transpose values to {label}")
                report.bits(group, transposed, wanted[dtype].T, f"quantize_transpose values_t to {label}")
                report.bits(group, plain_amax, wanted_amax, f"quantize amax of {label}")
                report.bits(group, both_amax, wanted_amax, f"quantize_transpose amax of {label}")
                report.bits(group, plain_scale, scale, f"quantize scale of {label}")
                report.bits(group, both_scale, scale, f"quantize_transpose scale of {label}")


def check_all_16_bit_patterns(report: Report):
    patterns = np.arange(2**16, dtype=np.uint16)
    for dtype in (ml_dtypes.bfloat16, np.float16):
        x = patterns.view(dtype)
        check_matrix(report, "all 16-bit patterns, vector path", x.reshape(256, 256), SCALES)
        check_matrix(report, "all 16-bit patterns, scalar path", x[1:].reshape(255, 257), SCALES[::3])
        finite = np.where(np.isfinite(x), x, np.zeros((), dtype)).reshape(256, 256)
        check_matrix(report, "finite 16-bit patterns", finite, SCALES[:2])


def check_shapes(report: Report):
    random = np.random.default_rng(0)
    for shape in SHAPES:
        for dtype in SOURCES:
            if dtype == jnp.float32:  # every kind of float32: denormals, infinities, NaN
                x = random.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)
                ordinary = random.random(shape) < 0.75
                x = np.where(ordinary, random.standard_normal(shape, dtype=np.float32), x)
            else:
                x = random.standard_normal(shape, dtype=np.float32).astype(dtype)
            check_matrix(report, "shapes", x, (SCALAR(0.0123),))
    for shape in ((), (5,), (3, 5, 7), (2, 3, 4, 80)):
        x = random.standard_normal(shape).astype(np.float32)
        report.bits("amax of any rank", jax.jit(amax)(x), reference.amax(x), f"amax of {shape}")
    for shapes in (((64, 64), (5, 7)), ((5,), (300, 256), (16,)), ((0, 4), (3, 3))):
        arrays = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
        wanted = max(map(reference.amax, arrays))
        report.bits("amax of several", jax.jit(amax)(*arrays), wanted, f"amax of {shapes}")
        report.bits("amax of several", jax.jit(amax)(*arrays[::-1]), wanted, f"amax of {shapes[::-1]}")
    nothing = np.full((32, 48), np.nan, np.float32)
    check_matrix(report, "nothing but NaN", nothing, (1.0,))
    check_matrix(report, "zeros", np.zeros((48, 32), np.float32), (1.0,))


def check_transpose(report: Report):
    """Every byte is in its place, also NaNs of every pattern."""
    random = np.random.default_rng(7)
    for shape in (*SHAPES, (48, 144), (144, 48), (1040, 4096), (32768, 2048)):
        bits = random.integers(0, 256, shape, dtype=np.uint8)
        for dtype in (E4M3, E5M2):
            x, label = bits.view(np.dtype(dtype)), f"{jnp.dtype(dtype).name}{list(shape)}"
            for got in twice_over_poison(jax.jit(transpose), jnp.asarray(x)):
                report.bits("transpose", got, x.T, label)
            if min(shape) > 1:
                unmoved = np.array_equal(got.view(np.uint8).ravel(), bits.ravel())
                report.expect("transpose", not unmoved, f"{label}: the order of bytes does not matter")


def amaxes() -> np.ndarray:
    """Special values, numbers around the limits, subnormals, and other float32, drawn log-uniformly."""
    limits = np.float32([2.0**-126, 448 * 2.0**-126, 57344 * 2.0**-126, 1e-3, 0.7, 448, 57344, 2.0**127])
    around = np.concatenate([np.nextafter(limits, SCALAR(0)), limits, np.nextafter(limits, SCALAR(np.inf))])
    special = np.float32([0, -0.0, np.inf, np.nan, 2.0**-149, 1e-40, 2.0**-127, np.finfo(np.float32).max])
    exponents = np.random.default_rng(4).uniform(-140, 128, 2000)
    return np.concatenate([special, around, np.exp2(exponents).astype(np.float32)])


def check_scales(report: Report):
    """The scale from an amax, bit for bit, by every rule."""
    x, measured = jnp.ones((1, 1), jnp.bfloat16), amaxes()
    for dtype in (E4M3, E5M2):
        for rule in RULES:
            how = FROM_AMAX | rule
            scales = jax.jit(
                lambda x, amaxes, how=how, dtype=dtype: jax.lax.map(
                    lambda amax: quantize(x, amax, dtype, **how)[2], amaxes
                )
            )(x, measured)
            label = f"{jnp.dtype(dtype).name} by {rule}"
            report.bits("scale from amax", scales, scale_by(rule, measured, dtype), label)
        largest = reference.FP8_MAX[np.dtype(dtype)]
        multiplied = scale_by({}, measured * (SCALAR(1) / largest) * largest, dtype)
        caught = bool((multiplied != scale_by({}, measured, dtype)).any())
        report.expect("scale from amax: a rounded reciprocal is noticed", caught, jnp.dtype(dtype).name)


def check_sources(report: Report):
    """Every kernel with every kind of source: the bytes of the expected scale, and the scale that it returns."""
    random = np.random.default_rng(5)
    vector = np.float32([0.0123, 2.0**-126, 7.3])
    for shape in ((256, 512), (129, 127), (4096, 1040), (0, 16), (16, 0)):  # by tiles, any, more than one block, empty
        for dtype in SOURCES:
            x = random.standard_normal(shape, dtype=np.float32).astype(dtype)
            cases = [(vector, GIVEN | {"row": np.int32(row)}, scale) for row, scale in enumerate(vector)]
            for rule in RULES:
                largest = SCALAR(0.01 + random.random())
                cases.append((largest, FROM_AMAX | rule, scale_by(rule, largest, E4M3)))
            cases += [(special, FROM_AMAX, SCALAR(1)) for special in np.float32([0, np.inf, np.nan])]
            check_cases(report, x, cases)


def check_cases(report: Report, x, cases):
    """All cases in one program; a case is a source, the rule to read it, and the expected scale."""

    def run(x, sources):
        hows = [how for _, how, _ in cases]
        calls = zip(sources, hows, strict=True)
        return [(quantize(x, s, E4M3, **how), quantize_transpose(x, s, E4M3, **how)) for s, how in calls]

    largest = reference.amax(x)
    for results in twice_over_poison(jax.jit(run), x, [source for source, _, _ in cases]):
        for (plain, transposing), (source, how, scale) in zip(results, cases, strict=True):
            (values, plain_amax, plain_scale), (both, transposed, both_amax, both_scale) = plain, transposing
            wanted = reference.quantize(x, E4M3, SCALAR(scale))[0]
            label = f"{x.dtype}{list(x.shape)} from {source} by {how}"
            report.bits("scale sources", values, wanted, f"quantize {label}")
            report.bits("scale sources", both, wanted, f"quantize_transpose values {label}")
            report.bits("scale sources", transposed, wanted.T, f"quantize_transpose values_t {label}")
            for got, expected in (
                (plain_amax, largest),
                (both_amax, largest),
                (plain_scale, scale),
                (both_scale, scale),
            ):
                report.bits("scale sources", got, SCALAR(expected), f"amax or scale {label}")


def gemm_inputs(random, m, n, k, types, d_dtype, has_bias, has_c):
    a = random.standard_normal((m, k)).astype(np.float32).astype(types[0])
    b = random.standard_normal((n, k)).astype(np.float32).astype(types[1])
    bias_dtype = jnp.bfloat16 if d_dtype == jnp.float32 else d_dtype
    addends = []
    if has_bias:
        addends.append(random.standard_normal(n).astype(bias_dtype))
    if has_c:
        addends.append(random.standard_normal((m, n)).astype(d_dtype))
    return a, b, SCALAR(0.37), SCALAR(0.051), *addends


def gemm_errors(got, a, b, a_scale, b_scale, *addends):
    """Against the exact result: |error|, sum|a||b|, and the size of what was rounded to the output's dtype.

    That is the result, and where something is added, for some of cuBLASLt's algorithms also the product before.
    """
    a, b = a.astype(np.float64) * np.float64(a_scale), b.astype(np.float64) * np.float64(b_scale)
    addends = [addend.astype(np.float64) for addend in addends]
    exact = a @ b.T + sum(addends)
    rounded = np.abs(exact) * (2 if addends else 1) + sum(np.abs(addend) for addend in addends)
    return np.abs(got.astype(np.float64) - exact), np.abs(a) @ np.abs(b).T, rounded


def check_gemm_once(report: Report, random, shape, types, d_dtype, has_bias, has_c, fast):
    m, n, k = shape
    inputs = gemm_inputs(random, m, n, k, types, d_dtype, has_bias, has_c)
    settings = {"dtype": d_dtype, "has_bias": has_bias, "has_c": has_c, "fast": fast}
    mode = "fast" if fast else "split"
    label = f"({m}, {n}, {k}) {jnp.dtype(types[0]).name} x {jnp.dtype(types[1]).name} -> {jnp.dtype(d_dtype).name}"
    label += f" {mode}{' +bias' if has_bias else ''}{' +c' if has_c else ''}"
    try:
        runs = twice_over_poison(jax.jit(lambda *args: gemm(*args, **settings)), *inputs)
    except jax.errors.JaxRuntimeError as error:
        report.expect("gemm", False, f"{label}: {str(error).splitlines()[0]}")
        return
    report.bits("gemm is deterministic", runs[0], runs[1], label)
    if not runs[0].size:
        return
    error, magnitude, rounded = gemm_errors(runs[0], *inputs)
    output = OUTPUT[d_dtype] * rounded
    share = float(np.max((error - output) / magnitude))
    report.worst[mode] = max(report.worst.get(mode, 0.0), share)
    bound = ACCUMULATION[fast]
    within = bool(np.isfinite(error).all()) and share <= bound
    report.expect("gemm", within, f"{label}: error {share:.2e} of sum|a||b|, allowed {bound:.2e}")
    wrong, magnitude, rounded = gemm_errors(runs[0], *inputs[:2], inputs[2] * SCALAR(1.25), *inputs[3:])
    caught = np.max((wrong - OUTPUT[d_dtype] * rounded) / magnitude) > bound
    report.expect("gemm: a wrong scale is noticed", bool(caught), label)


def check_gemm(report: Report):
    random = np.random.default_rng(1)
    pairs = ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3))
    flags = [(has_bias, has_c, fast) for has_bias in (False, True) for has_c in (False, True) for fast in (True, False)]
    for types in pairs:
        for d_dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
            for has_bias, has_c, fast in flags:
                check_gemm_once(report, random, (128, 192, 256), types, d_dtype, has_bias, has_c, fast)
    passes = ((pairs[0], jnp.bfloat16, False), (pairs[2], jnp.bfloat16, False), (pairs[1], jnp.float32, True))
    for shape in GEMM_SHAPES:
        for types, d_dtype, has_c in passes:
            for fast in (True, False):
                check_gemm_once(report, random, shape, types, d_dtype, not has_c, has_c, fast)


def check_gemm_alpha(report: Report):
    """alpha multiplies the product and not c: with operands scaled by it the product has the same bits."""
    random = np.random.default_rng(3)
    a, b, a_scale, b_scale, c = gemm_inputs(random, 256, 128, 64, (E4M3, E5M2), jnp.float32, False, True)
    for alpha in (0.25, 0.5, 4):  # powers of two: alpha adds no rounding
        for addends in ((), (c,)):
            settings = {"dtype": jnp.float32, "has_c": bool(addends), "in_place": False}
            got = gemm(a, b, a_scale, b_scale, *addends, **settings, alpha=alpha)
            scaled = gemm(a, b, SCALAR(alpha) * a_scale, b_scale, *addends, **settings)
            plain = gemm(a, b, a_scale, b_scale, *addends, **settings)
            report.bits("gemm alpha", np.asarray(got), np.asarray(scaled), f"{alpha=} {len(addends)} addends")
            report.expect("gemm alpha", not np.array_equal(got, plain), f"{alpha=} does nothing")


def check_gemm_columns(report: Report):
    """Some columns of a product, by rows of b and elements of the bias that start later, and not by others."""
    random = np.random.default_rng(7)
    kinds = (((E4M3, E4M3), jnp.bfloat16, True, False), ((E5M2, E4M3), jnp.float32, True, True))
    for types, d_dtype, has_bias, has_c in kinds:
        a, b, *scales, bias, _ = *gemm_inputs(random, 256, 1056, 512, types, d_dtype, has_bias, False), None
        for first, count in ((0, 512), (512, 256), (768, 256), (1024, 32), (16, 1040)):
            wanted = slice(first, first + count)
            c = [random.standard_normal((256, count)).astype(d_dtype)] if has_c else []
            settings = {
                "dtype": d_dtype,
                "has_bias": has_bias,
                "has_c": has_c,
                "in_place": False,
                "columns": (first, count),
            }
            run = jax.jit(functools.partial(gemm, **settings))
            got, again = twice_over_poison(run, a, b, *scales, bias, *c)
            label = f"columns {first} to {first + count} -> {jnp.dtype(d_dtype).name}"
            report.bits("gemm columns", got, again, label)
            for shift in (0, 16):
                rows = np.roll(b, -shift, axis=0)[wanted]
                error, magnitude, rounded = gemm_errors(got, a, rows, *scales, bias[wanted], *c)
                within = bool((error <= OUTPUT[d_dtype] * rounded + ACCUMULATION[True] * magnitude).all())
                report.expect("gemm columns", within == (shift == 0), f"{label}, {shift} rows away: {within=}")


def check_side_by_side(report: Report):
    """Matrices side by side have the cast and the sums of their concatenation."""
    random = np.random.default_rng(8)
    for rows, widths in (
        (256, (128, 64, 64)),
        (144, (16, 80, 48)),
        (48, (20, 7, 21)),
        (4096, (2048, 512, 512)),
        (128, (64, 32)),
    ):
        for dtype in SOURCES:
            x = random.integers(-9, 10, (rows, sum(widths))).astype(dtype)
            parts = tuple(map(jnp.asarray, np.split(x, np.cumsum(widths)[:-1], axis=1)))
            run = jax.jit(lambda parts: quantize_side_by_side(parts, jnp.float32(0.3), E5M2))
            label = f"{jnp.dtype(dtype).name} {rows} x {widths}"
            for got in twice_over_poison(run, parts):
                values, transposed, measured, _, sums = got
                expected = reference.quantize(x, E5M2, SCALAR(0.3))[0]
                report.bits("side by side", values, expected, f"{label}: values")
                report.bits("side by side", transposed, expected.T, f"{label}: transpose")
                report.bits("side by side", measured, reference.amax(x), f"{label}: amax")
                report.bits("side by side", sums, x.astype(np.float32).sum(axis=0), f"{label}: sums")
            wrong = np.asarray(run(parts[::-1])[0])
            report.expect("side by side", not np.array_equal(wrong, expected), f"{label}: their order does not matter")


def check_gemm_candidates(report: Report):
    """Every algorithm that cuBLASLt offers is right in every run; all ranks past its list are refused."""
    random = np.random.default_rng(6)
    kinds = (((E4M3, E4M3), jnp.bfloat16, True, False, True), ((E4M3, E5M2), jnp.float32, False, True, False))
    for shape, (types, d_dtype, has_bias, has_c, fast) in itertools.product(CANDIDATE_SHAPES, kinds):
        inputs = gemm_inputs(random, *shape, types, d_dtype, has_bias, has_c)
        settings = {"dtype": d_dtype, "has_bias": has_bias, "has_c": has_c, "fast": fast, "in_place": False}
        offered = CANDIDATES
        for candidate in range(CANDIDATES):
            label = f"{shape} -> {jnp.dtype(d_dtype).name}, candidate {candidate}"
            run = jax.jit(functools.partial(gemm, **settings, candidate=candidate))
            try:
                first, second = twice_over_poison(run, *inputs)
            except jax.errors.JaxRuntimeError as error:
                offered = min(offered, candidate)
                wanted = f"candidate must be one of the {offered} algorithms that cuBLASLt"
                told = str(error).startswith(f"{OFF_THE_LIST}:") and wanted in str(error)
                told = told and f"got rank {candidate}; tune again" in str(error)
                report.expect("gemm candidates", told and candidate > 0, f"{label}: {str(error).splitlines()[0]}")
                continue
            report.bits("gemm candidates", first, second, label)
            report.expect("gemm candidates", offered == CANDIDATES, f"{label} runs, though {offered} was past the list")
            error, magnitude, rounded = gemm_errors(first, *inputs)
            within = bool((error <= OUTPUT[d_dtype] * rounded + ACCUMULATION[fast] * magnitude).all())
            report.expect("gemm candidates", within, f"{label} is wrong")
        print(f"{shape} -> {jnp.dtype(d_dtype).name}: {offered} candidates", flush=True)


def check_take_rows(report: Report):
    """Every byte of every row is in its place, and rows that are not there are zeros."""
    random = np.random.default_rng(8)
    for of_x, rows, features in ((5, 16, 16), (300, 272, 144), (7, 257, 48), (4096, 33024, 2048)):
        bits = random.integers(0, 256, (of_x, features), dtype=np.uint8)
        sources = random.integers(-1, of_x + 1, rows).astype(np.int32)
        is_there = (sources >= 0) & (sources < of_x)
        wanted = np.where(is_there[:, None], bits[np.clip(sources, 0, of_x - 1)], 0).astype(np.uint8)
        for transposes in (True, False) if rows % 16 == 0 else (False,):
            take = jax.jit(take_rows_of_fp8, static_argnums=2)
            for got in twice_over_poison(take, jnp.asarray(bits.view(np.dtype(E4M3))), sources, transposes):
                label = f"{rows} rows of {of_x} x {features}"
                report.bits("take rows", got[0].view(np.uint8), wanted, label)
                if transposes:
                    report.bits("take rows", got[1].view(np.uint8), wanted.T, f"{label}, transposed")
            report.expect("take rows", not np.array_equal(got[0].view(np.uint8), wanted[::-1]), f"{label}: any order")


def check_gemm_in_place(report: Report):
    """A donated and aliased c is updated in place. The result is right, as it is with a c that stays."""
    random = np.random.default_rng(2)
    for d_dtype in (jnp.float32, jnp.bfloat16):
        inputs = gemm_inputs(random, 256, 128, 64, (E4M3, E5M2), d_dtype, False, True)
        apart = jax.jit(lambda *args, d_dtype=d_dtype: gemm(*args, dtype=d_dtype, has_c=True, in_place=False))(*inputs)
        step = jax.jit(lambda *args, d_dtype=d_dtype: gemm(*args, dtype=d_dtype, has_c=True), donate_argnums=4)
        donated = jnp.asarray(inputs[4]) + 0
        address = donated.unsafe_buffer_pointer()
        together = step(*inputs[:4], donated)
        for what, got in (("in place", together), ("apart", apart)):
            error, magnitude, rounded = gemm_errors(np.asarray(got), *inputs)
            within = bool((error <= OUTPUT[d_dtype] * rounded + ACCUMULATION[True] * magnitude).all())
            report.expect("gemm in place", within, f"{jnp.dtype(d_dtype).name} {what} is wrong")
        report.expect(
            "gemm in place", together.unsafe_buffer_pointer() == address, "the donated accumulator was copied"
        )


def check_refusals(report: Report):
    """Every call that breaks the contract raises, and the message names operation and argument."""
    x, one = jnp.ones((32, 64), jnp.bfloat16), SCALAR(1)
    a, b = jnp.ones((32, 64), E4M3), jnp.ones((48, 64), E4M3)
    result = jax.ShapeDtypeStruct((32, 64), E4M3)

    def raw(target, results, **attributes):
        return lambda *args: jax.ffi.ffi_call(target, results)(*args, **attributes)

    def cast(results, **how):
        return raw("jax_fp8_quantize", results, **GIVEN | how)

    def both_ways(results):
        return raw("jax_fp8_quantize_transpose", results, **GIVEN)

    def product(d=(32, 48), dtype=jnp.bfloat16, workspace=WORKSPACE, **flags):
        flags = {"has_bias": False, "has_c": False, "fast_accumulation": True, "alpha": np.float32(1)} | flags
        flags = {"first_column": np.int64(0), "candidate": np.int32(0), "scaling": ""} | flags
        return raw("jax_fp8_gemm", (jax.ShapeDtypeStruct(d, dtype), workspace), **flags)

    transposed = jax.ShapeDtypeStruct((64, 32), E5M2)
    cases = [
        (cast((result, AMAX, SCALE)), (x.astype(jnp.int32), one), "x must be"),
        (cast((result, AMAX, SCALE)), (x[None], one), "x must have rank 2"),
        (cast((result, AMAX, SCALE)), (x, jnp.ones((1, 3))), "source must have rank 0 or 1"),
        (cast((result, AMAX, SCALE), row=np.int32(3)), (x, jnp.ones(3)), "source must have an element 3"),
        (cast((result, AMAX, SCALE), row=np.int32(-1)), (x, jnp.ones(3)), "source must have an element -1"),
        (cast((result, AMAX, SCALE), row=np.int32(1)), (x, one), "source must have an element 1"),
        (cast((result, AMAX, SCALE)), (x, one.astype(jnp.bfloat16)), "source must be float32"),
        (cast((jax.ShapeDtypeStruct((32, 64), jnp.uint8), AMAX, SCALE)), (x, one), "values must be float8"),
        (cast((transposed, AMAX, SCALE)), (x, one), "values must have shape [32, 64]"),
        (cast((result, AMAX, jax.ShapeDtypeStruct((1,), jnp.float32))), (x, one), "scale must have shape []"),
        (both_ways((result, transposed, AMAX, SCALE)), (x, one), "values_t must be float8_e4m3fn"),
        (both_ways((result, result, AMAX, SCALE)), (x, one), "values_t must have shape [64, 32]"),
        (both_ways((result, result, AMAX, SCALE)), (x, one, x), "values must have shape [32, 128]"),
        (both_ways((result, result, AMAX, SCALE)), (x, one, x[:16]), "x must have shape [32, 64]"),
        (both_ways((result, result, AMAX, SCALE)), (x, one, x.astype(jnp.float32)), "x must be bfloat16"),
        (both_ways((result, result, AMAX, SCALE)), (x, one, x, x, x), "x must come in at most 3 matrices side by side"),
        (raw("jax_fp8_transpose", transposed), (x,), "x must be float8_e4m3fn or float8_e5m2"),
        (raw("jax_fp8_transpose", transposed), (a[None],), "x must have rank 2"),
        (raw("jax_fp8_transpose", transposed), (a,), "result must be float8_e4m3fn"),
        (raw("jax_fp8_transpose", result), (a,), "result must have shape [64, 32]"),
        (raw("jax_fp8_amax", AMAX), (x.astype(E4M3),), "x must be"),
        (raw("jax_fp8_amax", jax.ShapeDtypeStruct((), jnp.bfloat16)), (x,), "result must be float32"),
        (product(), (x, b, one, one), "a must be float8_e4m3fn or float8_e5m2"),
        (product(), (a, x, one, one), "b must be float8_e4m3fn or float8_e5m2"),
        (product(), (a.astype(E5M2), b.astype(E5M2), one, one), "float8_e5m2"),
        (product(), (a[:, :40], b[:, :40], one, one), "multiple of 16"),
        (product((32, 40)), (a, b[:40], one, one), "multiple of 16"),
        (product(), (a, b[:, :32], one, one), "b must have shape [48, 64]"),
        (product((16, 48)), (a, b, one, one), "d must have shape [32, 48]"),
        (
            product((32, 64)),
            (a, b, one, one),
            "b must have 64 rows from first_column on, a multiple of 16, here 0",
        ),
        (product((32, 32), first_column=np.int64(32)), (a, b, one, one), "here 32"),
        (product((32, 32), first_column=np.int64(8)), (a, b, one, one), "here 8"),
        (product((32, 32), first_column=np.int64(-16)), (a, b, one, one), "here -16"),
        (product(dtype=jnp.int32), (a, b, one, one), "d must be bfloat16 or float16 or float32"),
        (product(workspace=jax.ShapeDtypeStruct((1024,), jnp.uint8)), (a, b, one, one), "workspace must have shape"),
        (product(), (a, b, jnp.ones((3,)), one), "a_scale must have shape []"),
        (product(has_bias=True), (a, b, one, one), "bias"),
        (product(has_bias=True), (a, b, one, one, jnp.ones(48)), "bias must be bfloat16"),
        (product(has_bias=True), (a, b, one, one, jnp.ones(32, jnp.bfloat16)), "bias must have shape [48]"),
        (product(has_c=True), (a, b, one, one, jnp.ones((32, 48))), "c must be bfloat16"),
        (product(), (a, b, one, one, jnp.ones(48, jnp.bfloat16)), "5 arguments"),
        (product(candidate=np.int32(CANDIDATES)), (a, b, one, one), "candidate must be from 0 to 15, got 16"),
        (product(candidate=np.int32(-1)), (a, b, one, one), "candidate must be from 0 to 15, got -1"),
    ]
    for call, args, fragment in cases:
        try:
            jax.block_until_ready(jax.jit(call)(*args))
            report.expect("refusals", False, f"nothing was raised where {fragment!r} was due")
        except jax.errors.JaxRuntimeError as error:
            report.expect(
                "refusals", fragment in str(error) and "jax_fp8_" in str(error), f"{fragment!r} is not in: {error}"
            )


def check_graphs(report: Report):
    """A CUDA graph, captured, replayed and updated, gives the same bytes as a run without one."""

    def chain(x, w, scale):
        values, transposed, largest, scale = quantize_transpose(x, scale, E4M3)
        w_amax = amax(w)
        weights, _, w_scale = quantize(w, w_amax, E4M3, **FROM_AMAX)
        product = gemm(values, weights, scale, w_scale, dtype=jnp.bfloat16)
        gradient = gemm(transposed, transposed, scale, scale, dtype=jnp.float32, fast=False)
        return product, gradient, largest, w_amax, w_scale, transpose(values)

    captured = jax.jit(chain, compiler_options=IN_A_GRAPH)
    plain = jax.jit(chain, compiler_options={"xla_gpu_enable_command_buffer": ""})
    random = np.random.default_rng(3)
    for run in range(5):
        x = jnp.asarray(random.standard_normal((256, 512)), jnp.bfloat16)
        w = jnp.asarray(random.standard_normal((384, 512)), jnp.float32)
        scale = jnp.float32(0.01 * (run + 1))
        for got, wanted in zip(captured(x, w, scale), plain(x, w, scale), strict=True):
            report.bits("CUDA graph", got, wanted, f"run {run}")


# ---- speed -----------------------------------------------------------------------------------------------------------


def seconds_per_call(function, batches, repeats=8) -> float:
    """Median time of one of several calls on different inputs that one program makes, as a CUDA graph.

    A sample is ten programs dispatched in a row, so that the device never waits for the host.
    """
    program = jax.jit(lambda batches: [function(*args) for args in batches], compiler_options=IN_A_GRAPH)
    for _ in range(3):
        jax.block_until_ready(program(batches))
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(9):
            program(batches)
        jax.block_until_ready(program(batches))
        samples.append(time.perf_counter() - start)
    return statistics.median(samples) / len(batches) / 10


def time_memory_bound(report: Report):
    copy_input = [(jax.random.bits(jax.random.key(i), (256 << 20,), jnp.uint32),) for i in range(4)]
    copy = 2 * copy_input[0][0].nbytes / seconds_per_call(lambda x: x ^ jnp.uint32(1), copy_input)
    report.timings.append(
        {"what": "copy (x ^ 1)", "shape": "u32[268435456]", "TB/s": copy / 1e12, "share of copy": 1.0}
    )
    del copy_input
    for dtype, shape in (
        (jnp.bfloat16, (16384, 2048)),
        (jnp.bfloat16, (16384, 8192)),
        (jnp.float32, (2048, 8192)),
        (jnp.bfloat16, (2048, 2048)),
    ):
        count = 16 if np.prod(shape) <= 2**25 else 4
        inputs = [(jax.random.normal(jax.random.key(i), shape, dtype), jnp.float32(0.01)) for i in range(count)]
        size, width = int(np.prod(shape)), jnp.dtype(dtype).itemsize
        for name, call, bytes_moved in (
            ("quantize_transpose", lambda x, scale: quantize_transpose(x, scale, E4M3), size * (width + 2)),
            ("its scale from amax", lambda x, amax: quantize_transpose(x, amax, E4M3, **FROM_AMAX), size * (width + 2)),
            ("quantize", lambda x, scale: quantize(x, scale, E4M3), size * (width + 1)),
            ("amax", lambda x, scale: amax(x), size * width),
        ):
            seconds = seconds_per_call(call, inputs)
            rate = bytes_moved / seconds
            label = f"{jnp.dtype(dtype).name}{list(shape)}"
            row = {"what": name, "shape": label, "us": seconds * 1e6, "TB/s": rate / 1e12, "share of copy": rate / copy}
            report.timings.append(row)


def time_transpose(report: Report):
    """Timed next to a copy of as many bytes and XLA's own transpose."""
    for shape in TRANSPOSE_TIMED:
        keys = jax.random.split(jax.random.key(0), 16 if np.prod(shape) <= 2**25 else 4)
        words = [jax.random.bits(key, (*shape[:1], shape[1] // 4), jnp.uint32) for key in keys]
        values = [(jax.lax.bitcast_convert_type(word, E4M3).reshape(shape),) for word in words]
        copy = seconds_per_call(lambda x: x ^ jnp.uint32(1), [(word,) for word in words])
        for name, seconds in (
            ("transpose", seconds_per_call(transpose, values)),
            ("  XLA's", seconds_per_call(jnp.transpose, values)),
            ("  copy (x ^ 1)", copy),
        ):
            row = {"what": name, "shape": f"float8_e4m3fn{list(shape)}", "us": seconds * 1e6}
            row |= {"TB/s": 2 * int(np.prod(shape)) / seconds / 1e12, "share of copy": copy / seconds}
            report.timings.append(row)


def time_gemm(report: Report):
    """The three GEMMs of each layer of a 1.3B model at 16k tokens."""
    tokens = 16384
    for k, n in ((2048, 6144), (2048, 2048), (2048, 8192), (8192, 2048)):
        passes = (
            ("fprop", (tokens, n, k), (E4M3, E4M3), jnp.bfloat16),
            ("dgrad", (tokens, k, n), (E5M2, E4M3), jnp.bfloat16),
            ("wgrad", (k, n, tokens), (E4M3, E5M2), jnp.float32),
        )
        for name, (rows, cols, depth), types, d_dtype in passes:
            keys = jax.random.split(jax.random.key(0), 8).reshape(4, 2)
            batches = [
                (
                    jax.random.normal(left, (rows, depth), jnp.bfloat16).astype(types[0]),
                    jax.random.normal(right, (cols, depth), jnp.bfloat16).astype(types[1]),
                    jnp.float32(0.5),
                    jnp.float32(0.25),
                )
                for left, right in keys
            ]
            for fast in (True, False):
                seconds = seconds_per_call(
                    lambda *args, fast=fast, d_dtype=d_dtype: gemm(*args, dtype=d_dtype, fast=fast), batches
                )
                rate = 2 * rows * cols * depth / seconds / 1e12
                what = f"gemm {name} {'fast' if fast else 'split'}"
                report.timings.append(
                    {"what": what, "shape": f"{rows} x {cols} x {depth}", "us": seconds * 1e6, "TFLOP/s": rate}
                )


CHECKS = [check_all_16_bit_patterns, check_shapes, check_scales, check_sources, check_gemm, check_gemm_alpha]
CHECKS += [
    check_transpose,
    check_take_rows,
    check_gemm_in_place,
    check_gemm_candidates,
    check_gemm_columns,
    check_side_by_side,
]
CHECKS += [check_graphs, check_refusals]


def main(arguments: list[str] | None = None) -> int:
    return run_script(Script(__file__, __doc__, CHECKS, [time_memory_bound, time_transpose, time_gemm]), arguments)


if __name__ == "__main__":
    sys.exit(main())

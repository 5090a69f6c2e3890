"""The activation kernels on a GPU: bit for bit where arithmetic is exact, else against rounded float64; then speed.

    python tests/gpu/activation_check.py --output activation_check.json      # about three minutes on an H200
    python tests/gpu/activation_check.py --self-test                      # the references, with small arrays, on a CPU

Every program runs twice, each time over memory filled with another pattern. The ReLUs are exact, signs of zeros
included. Of the other activations nearly all FP8 values must equal those of float64, and the rest may be one step off:
the kernels' float32 has an error of some 2**-22, which matters where it decides a rounding. Ends with a table of
timings, one line per group of checks, and exit code 1 if a check failed.
"""

import itertools
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

import plain
import reference
from gpu.kernel_check import (
    AMAX,
    E4M3,
    E5M2,
    GIVEN,
    IN_A_GRAPH,
    SOURCES,
    seconds_per_call,
    twice_over_poison,
)
from gpu.report import Report, Script, on_gpu, run_script

from jax_fp8.core.cast import LINE, Cast
from jax_fp8.core.scale import ScaleFormula
from jax_fp8.kernels.activation import (
    TARGET,
    activation_amax,
    activation_backward_amax,
    activation_backward_quantize,
    activation_quantize,
)
from jax_fp8.kernels.activation_functions import activate, activate_backward
from jax_fp8.kernels.quantize import quantize_transpose, quantize_transpose_sums, sums_results

ALL = (*plain.ACTIVATIONS, *plain.GATES)
EXACT = ("relu", "squared_relu", "reglu")
SCALE, ACTIVATED_SCALE = np.float32(0.07), np.float32(0.05)
ADDITIONS = 2.0**-18  # relative to the sum of magnitudes: some 50 in float32, one after the other
SHARE_EQUAL = {"bfloat16": 0.999, "float16": 0.997, "float32": 0.9995}  # of FP8 values, with the float64 ones
SHAPES = ((128, 64), (1024, 2048), (144, 272), (16, 16), (80, 4112), (129, 127), (1, 1), (3, 4099), (4099, 3))
SMALL_SHAPES = ((144, 80), (33, 65))
EMPTY = ((0, 16), (16, 0))


@dataclass(frozen=True)
class Case:
    """One tensor to be made and quantized: y of x, or with `backward` dx of (dy, x); `shape` is that of y."""

    activation: str
    backward: bool
    shape: tuple[int, int]
    source: np.dtype
    dtype: type

    @property
    def gated(self) -> bool:
        return self.activation in plain.GATES

    def inputs(self, seed=0) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(seed)
        rows, width = self.shape
        x = 2 * random.standard_normal((rows, width * (2 if self.gated else 1)), dtype=np.float32)
        return random.standard_normal(self.shape, dtype=np.float32).astype(self.source), x.astype(self.source)

    def fused(self, dy, x, scale):
        """The pair; of a gradient also its sums and its companion, the columnwise activated tensor."""
        cast = Cast.with_scale(self.dtype, scale)
        if not self.backward:
            return activation_quantize(x, self.activation, cast), None, None
        activated_cast = Cast.with_scale(self.activated_dtype, ACTIVATED_SCALE)
        return activation_backward_quantize(dy, x, self.activation, cast, activated_cast)

    @property
    def activated_dtype(self):
        """The other format, so that a mix-up of the two is noticed."""
        return E5M2 if self.dtype == E4M3 else E4M3

    def amax(self, dy, x):
        return (
            activation_backward_amax(dy, x, self.activation) if self.backward else activation_amax(x, self.activation)
        )

    def everything(self, dy, x, scale):
        """Values, transpose, amax, scale; the amax kernel's amax; of a gradient also its sums and companion."""
        pair, sums, activated = self.fused(dy, x, scale)
        values, transposed, scale, amax = pair.arrays
        beside = None if activated is None else activated.values
        return values, transposed, amax, scale, self.amax(dy, x), sums, beside

    def __str__(self):
        direction = "gradient of " if self.backward else ""
        return f"{direction}{self.activation} {np.dtype(self.source)}{list(self.shape)} in {np.dtype(self.dtype)}"


# ---- the oracles -----------------------------------------------------------------------------------------------------


def exact(case: Case, dy, x) -> np.ndarray:
    """The results of the ReLUs, operation by operation in NumPy's float32, rounded to the dtype of x."""

    def relu(x):
        return np.where(x <= 0, np.float32(0), x)

    dy, x = dy.astype(np.float32), x.astype(np.float32)
    with np.errstate(all="ignore"):
        if case.activation == "reglu":
            gate, linear = np.split(x, 2, axis=1)
            gradient = np.concatenate([np.where(gate > 0, dy * linear, np.float32(0)), dy * relu(gate)], axis=1)
            made = gradient if case.backward else relu(gate) * linear
        elif case.activation == "relu":
            made = np.where(x > 0, dy, np.float32(0)) if case.backward else relu(x)
        else:
            made = (
                np.where(x > 0, dy * (2 * x), np.float32(0))
                if case.backward
                else np.where(x <= 0, np.float32(0), x * x)
            )
        return made.astype(case.source)


def in_float64(case: Case, dy, x) -> np.ndarray:
    """By the textbook's formula and its derivative, rounded to the dtype of x."""
    y, (dx,) = plain.result_and_gradients(lambda x: plain.activate(x, case.activation), dy, x)
    return (dx if case.backward else y).astype(np.float32).astype(case.source)


def steps_between(values, wanted) -> np.ndarray:
    """How many FP8 values lie between two, where neither is NaN."""

    def order(values):
        byte = values.view(np.uint8).astype(np.int32)
        return np.where(byte < 128, byte, 128 - byte)

    numbers = ~np.isnan(values.astype(np.float32)) & ~np.isnan(wanted.astype(np.float32))
    return np.where(numbers, np.abs(order(values) - order(wanted)), 0)


# ---- correctness -----------------------------------------------------------------------------------------------------


def check_case(report: Report, case: Case, inputs=None):
    dy, x = inputs or case.inputs()
    runs = twice_over_poison(jax.jit(case.everything), dy, x, SCALE)
    for first, second in zip(jax.tree.leaves(runs[0]), jax.tree.leaves(runs[1]), strict=True):
        report.bits("deterministic", first, second, str(case))
    values, transposed, amax, scale, alone, sums, activated = runs[0]
    made = exact(case, dy, x) if case.activation in EXACT else in_float64(case, dy, x)
    wanted = reference.quantize(made, case.dtype, SCALE)[0]
    report.bits("transpose", transposed, values.T, str(case))
    report.bits("scale", scale, SCALE, str(case))
    report.bits("amax alone", alone, amax, str(case))
    if case.activation in EXACT:
        group = "exact"
        report.bits(group, values if on_gpu() else np.abs(values), wanted if on_gpu() else np.abs(wanted), str(case))
        report.bits(group, amax, reference.amax(made), f"amax of {case}")
    elif made.size:
        group = "float64 rounded the same way"
        steps, share = steps_between(values, wanted), SHARE_EQUAL[np.dtype(case.source).name]
        allowed = max((1 - share) * steps.size, 2)
        holds = steps.max() <= 1 and np.count_nonzero(steps) <= allowed
        report.expect(
            group, bool(holds), f"{case}: {np.count_nonzero(steps)} of {steps.size} differ, up to {steps.max()}"
        )
        largest = reference.amax(made)
        close = abs(amax - largest) <= largest * (1e-6 if case.source == np.float32 else 2.0**-7) or amax == largest
        report.expect(group, bool(close), f"amax of {case}: {amax} instead of {largest}")
    if activated is not None:
        check_activated(report, case, x, activated)
    if sums is not None and np.isfinite(made.astype(np.float32)).all():
        check_sums(report, case, dy, x, runs[0])


def check_activated(report: Report, case: Case, x, activated):
    """A gradient's companion has the bits that the forward would write. Negative control: another scale."""

    def of_the_forward(scale):
        cast = Cast.with_scale(case.activated_dtype, scale)
        return activation_quantize(x, case.activation, cast, orientations="columnwise").columnwise.values

    report.bits("activated beside its gradient", activated, of_the_forward(ACTIVATED_SCALE), str(case))
    other = np.asarray(of_the_forward(ACTIVATED_SCALE * np.float32(1.3)))
    unequal = np.mean(np.asarray(activated).view(np.uint8) != other.view(np.uint8)) if x.size else 1
    if x.size > 1000:
        report.expect("another scale is noticed", bool(unequal > 0.01), f"{case}: {unequal}")


def check_sums(report: Report, case: Case, dy, x, results):
    """Values, amax and sums of a gradient follow from its elements as the kernel computes them."""
    values, _, amax, _, _, sums, _ = results
    own = elements(case, dy, x)
    quantized = reference.quantize(own, case.dtype, SCALE)[0]
    report.bits("sums", np.where(values == 0, 0, values), np.where(quantized == 0, 0, quantized), f"values of {case}")
    report.bits("sums", amax, reference.amax(own), f"amax of {case}")
    error = error_of_sums(sums, own)
    report.expect("sums", bool((error <= 1).all()), f"{case}: off by up to {np.max(error, initial=0):.2g} bounds")


def elements(case: Case, dy, x) -> np.ndarray:
    """The elements of a gradient that the kernel sums up: the sums of columns in which nothing else is.

    All elements lie in one row, beside each other; 15 rows of zeros below it where the case is one for the kernel of
    whole vectors.
    """
    (rows, width), halves = case.shape, 2 if case.gated else 1
    zeros = 15 if rows % 16 == 0 and width % 16 == 0 else 0

    @jax.jit
    def run(dy, x):
        one_row = x.reshape(rows, halves, width).swapaxes(0, 1).reshape(1, -1)
        dy, x = (jnp.pad(row, ((0, zeros), (0, 0))) for row in (dy.reshape(1, -1), one_row))
        return case.fused(dy, x, SCALE)

    own = np.asarray(run(dy, x)[1]).reshape(halves, rows, width)
    return own.swapaxes(0, 1).reshape(rows, halves * width)


def error_of_sums(sums, elements) -> np.ndarray:
    """The error of each column's sum, relative to what float32 may lose."""
    exact, magnitudes = (array.astype(np.float64).sum(axis=0) for array in (elements, np.abs(elements)))
    return np.abs(sums - exact) / (ADDITIONS * magnitudes + 1e-30)


def check_wrong_sums(report: Report):
    """Negative controls: without one row, of what was not yet rounded to the dtype of x, of what was rounded to FP8."""
    for shape in ((144, 272), (33, 65)):
        case = Case("geglu", True, shape, ml_dtypes.bfloat16, E4M3)
        dy, x = case.inputs()
        values, *_, sums, _ = jax.tree.map(np.asarray, jax.jit(case.everything)(dy, x, SCALE))
        own, _, (exact,) = (
            elements(case, dy, x),
            *plain.result_and_gradients(partial(plain.activate, activation="geglu"), dy, x),
        )
        for what, other in (
            ("a row less", own[1:]),
            ("not rounded", exact),
            ("in FP8", values.astype(np.float32) * SCALE),
        ):
            noticed = np.mean(error_of_sums(sums, other) > 1) > 0.5
            report.expect("wrong sums are noticed", bool(noticed), f"{what}, {case}")


def check_shapes(report: Report):
    pairs = list(zip(SOURCES, (E4M3, E5M2, E4M3), strict=True))
    for shape in SHAPES if on_gpu() else SMALL_SHAPES:
        for activation, backward in itertools.product(ALL, (False, True)):
            for source, dtype in pairs if on_gpu() else pairs[:1]:
                check_case(report, Case(activation, backward, shape, source, dtype))


def check_formats(report: Report):
    pairs = list(itertools.product(SOURCES, (E4M3, E5M2)))
    for activation, backward in itertools.product(ALL, (False, True)):
        for source, dtype in pairs if on_gpu() else pairs[3:5]:
            check_case(report, Case(activation, backward, (256, 192), source, dtype))


def check_another_function(report: Report):
    """Negative control: the two GELUs, a thousandth apart, are told apart by the share of equal values."""
    case = Case("gelu", False, (256, 192), ml_dtypes.bfloat16, E4M3)
    dy, x = case.inputs()
    values = np.asarray(jax.jit(case.everything)(dy, x, SCALE)[0])
    other = in_float64(Case("gelu_exact", False, (256, 192), ml_dtypes.bfloat16, E4M3), dy, x)
    different = np.count_nonzero(steps_between(values, reference.quantize(other, E4M3, SCALE)[0]))
    report.expect("another function is noticed", different > 2 * (1 - SHARE_EQUAL["bfloat16"]) * x.size, f"{different}")


def check_every_bfloat16(report: Report):
    """Special x with dy and linear of one: NaN for NaN only, finite for finite, bit for bit where exact."""
    x = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(256, 256)
    if not on_gpu():  # XLA's CPU compiler flushes subnormal numbers
        x = np.where(np.abs(x.astype(np.float32)) < 2.0**-126, np.zeros((), x.dtype), x)
    one = np.ones_like(x)
    for activation, backward in itertools.product(ALL, (False, True)):
        case = Case(activation, backward, x.shape, ml_dtypes.bfloat16, E4M3)
        inputs = one, np.concatenate([x, one], axis=1) if case.gated else x
        if activation in EXACT:
            check_case(report, case, inputs)
            continue
        values = np.asarray(jax.jit(case.everything)(*inputs, SCALE)[0])[:, :256]
        finite = np.isfinite(x.astype(np.float32)) & (np.abs(x.astype(np.float32)) < 1e12)
        got = np.isnan(values.astype(np.float32))
        report.expect("no NaN from numbers", not got[finite].any(), f"{case}: {np.count_nonzero(got[finite])}")
        report.expect("NaN stays NaN", bool(got[np.isnan(x.astype(np.float32))].all()), str(case))


def check_infinities(report: Report):
    """Gradients that a ReLU stops are zero, even infinite ones."""
    for shape in ((16, 16), (3, 5)):
        case = Case("relu", True, shape, ml_dtypes.bfloat16, E4M3)
        x, dy = np.zeros(shape, case.source), np.full(shape, np.inf, case.source)
        x.flat[:4] = [np.nan, np.inf, -np.inf, 2]
        check_case(report, case, (dy, x))
        check_case(report, Case("relu", False, shape, ml_dtypes.bfloat16, E4M3), (dy, x))


def check_orientations_and_scales(report: Report):
    for activation, shape in itertools.product(("gelu", "swiglu"), ((256, 192), (33, 65))):
        dy, x = Case(activation, False, shape, ml_dtypes.bfloat16, E4M3).inputs()
        run = jax.jit(
            lambda x, scale, activation=activation: [
                activation_quantize(x, activation, Cast.with_scale(E4M3, scale), orientations=which)
                for which in ("both", "rowwise", "columnwise")
            ]
        )
        for both, rowwise, columnwise in twice_over_poison(run, x, SCALE):
            for got, wanted in ((rowwise.rowwise, both.rowwise), (columnwise.columnwise, both.columnwise)):
                report.bits("orientations", got.values, wanted.values, activation)
            for one in (rowwise, columnwise):
                report.bits("orientations", one.amax, both.amax, f"amax of {activation}")
        row = Cast.with_row(E4M3, jnp.float32([1, SCALE, 3]), 1)
        largest = activation_backward_amax(dy, x, activation)
        from_amax = Cast.from_amax(E4M3, largest, ScaleFormula())
        activated_cast = Cast.with_scale(E4M3, ACTIVATED_SCALE)
        # By NumPy's division: XLA's on a GPU is not always rounded to nearest.
        for cast, scale in ((row, SCALE), (from_amax, reference.current_scale(largest, E4M3))):
            got = activation_backward_quantize(dy, x, activation, cast, activated_cast)
            given = activation_backward_quantize(dy, x, activation, Cast.with_scale(E4M3, scale), activated_cast)
            for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(given), strict=True):
                report.bits("sources of the scale", one, other, activation)


def check_weights_of_rows(report: Report):
    """Bit for bit where products are exact. Negative controls: weights of other rows; those of ones change nothing."""
    shapes = ((1024, 2048), (4112, 1408), (129, 127)) if on_gpu() else SMALL_SHAPES
    for shape, activation, backward in itertools.product(shapes, ("relu", "reglu"), (False, True)):
        case = Case(activation, backward, shape, ml_dtypes.bfloat16, E4M3)
        dy, x = case.inputs()
        weights = ((1 + np.random.default_rng(1).permutation(shape[0]) % 250) / 128).astype(np.float32)
        run = jax.jit(partial(weighted, case))
        runs = twice_over_poison(run, dy, x, weights)
        for first, second in zip(*map(jax.tree.leaves, runs), strict=True):
            report.bits("weights: deterministic", first, second, str(case))
        pair, amax, activated, of_the_forward = runs[0]
        made = of_weighted(case, dy, x, weights)
        wanted, largest = reference.quantize(made, case.dtype, SCALE)
        values = pair.rowwise.values
        report.bits("weights", *(np.where(v == 0, np.zeros((), v.dtype), v) for v in (values, wanted)), str(case))
        report.bits("weights", pair.columnwise.values, values.T, f"transpose of {case}")
        report.bits("weights", np.stack([pair.amax, amax]), np.stack([largest, largest]), f"amax of {case}")
        report.bits("weights", activated, of_the_forward, f"activated beside {case}")
        other = reference.quantize(of_weighted(case, dy, x, np.roll(weights, 1)), case.dtype, SCALE)[0]
        unequal = np.mean(values.view(np.uint8) != other.view(np.uint8))
        report.expect("weights of other rows are noticed", bool(unequal > 0.2), f"{case}: {unequal}")
        ones = run(dy, x, np.ones_like(weights))[0]
        report.bits("weights of one", ones.rowwise.values, case.fused(dy, x, SCALE)[0].rowwise.values, str(case))


def weighted(case: Case, dy, x, weights):
    """The pair, the amax alone, the activated tensor, and the same as the forward makes it."""
    cast, activated_cast = Cast.with_scale(case.dtype, SCALE), Cast.with_scale(case.activated_dtype, ACTIVATED_SCALE)
    forward = activation_quantize(x, case.activation, activated_cast, weights, orientations="columnwise")
    if not case.backward:
        values = forward.columnwise.values
        pair = activation_quantize(x, case.activation, cast, weights)
        return pair, activation_amax(x, case.activation, weights), values, values
    pair, _, activated = activation_backward_quantize(dy, x, case.activation, cast, activated_cast, weights)
    amax = activation_backward_amax(dy, x, case.activation, weights)
    return pair, amax, activated.values, forward.columnwise.values


def of_weighted(case: Case, dy, x, weights) -> np.ndarray:
    """`exact` of float32, with the weights where they belong, rounded once."""
    wide = replace(case, source=np.float32)
    if case.backward:
        return exact(wide, dy.astype(np.float32) * weights[:, None], x).astype(case.source)
    return (exact(wide, dy, x) * weights[:, None]).astype(case.source)


def check_weights_of_rows_by_tile(report: Report):
    """With powers of two as weights the lines of a row have the same values, and scales times its weight. No line of
    these functions is all zeros.
    """
    smooth = ("gelu", "silu", "swiglu", "geglu")
    for shape, activation in itertools.product(((1024, 2048), (129, 127)) if on_gpu() else SMALL_SHAPES, smooth):
        case = Case(activation, False, shape, ml_dtypes.bfloat16, E4M3)
        dy, x = case.inputs()
        weights = np.exp2(np.arange(shape[0]) % 5 - 2).astype(np.float32)
        cast = Cast.by_tile(E4M3, LINE, ScaleFormula())

        @jax.jit
        def run(dy, x, weights, activation=activation, cast=cast):
            forward = activation_quantize(x, activation, cast, weights)
            backward = activation_backward_quantize(dy, x, activation, cast, cast, weights)
            return forward.rowwise, forward.columnwise, backward[0].rowwise, backward[2]

        forward, transposed, backward, again = jax.tree.map(np.asarray, run(dy, x, weights))
        without = jax.tree.map(np.asarray, run(dy, x, np.ones_like(weights)))
        for name, got, plain_one in (("y", forward, without[0]), ("dx", backward, without[2])):
            report.bits("weights by tile", got.values, plain_one.values, f"{name} of {case}")
            report.bits("weights by tile", got.scale, plain_one.scale * weights[:, None], f"scales of {name}, {case}")
        report.bits("weights by tile", again.values, transposed.values, f"activated again, {case}")
        report.bits("weights by tile", again.scale, transposed.scale, f"its scales, {case}")


def check_empty(report: Report):
    for activation, shape in itertools.product(("gelu", "swiglu"), EMPTY):
        case = Case(activation, True, shape, ml_dtypes.bfloat16, E4M3)
        dy, x = case.inputs()
        for *_, amax, scale, alone, sums, _ in twice_over_poison(jax.jit(case.everything), dy, x, SCALE):
            for got, wanted in ((amax, 0), (scale, SCALE), (alone, 0), (sums, np.zeros(x.shape[1]))):
                report.bits("empty", got, np.float32(wanted), str(case))


def check_sums_of_a_cast(report: Report):
    random = np.random.default_rng(0)
    for shape, source in itertools.product((*SMALL_SHAPES, *SHAPES[: 8 if on_gpu() else 0], *EMPTY), SOURCES):
        x = random.integers(-9, 10, shape).astype(source)  # their sums are exact
        cast = Cast.with_scale(E4M3, SCALE)
        run = jax.jit(lambda x, cast=cast: (quantize_transpose_sums(x, cast), quantize_transpose(x, cast)))
        for (pair, sums), plainly in twice_over_poison(run, x):
            for one, other in zip(jax.tree.leaves(pair), jax.tree.leaves(plainly), strict=True):
                report.bits("cast with sums", one, other, f"{source}{shape}")
            report.bits("cast with sums", sums, x.astype(np.float32).sum(axis=0), f"sums {source}{shape}")


def check_graphs(report: Report):
    for activation in ("gelu", "geglu"):
        case = Case(activation, True, (512, 384), ml_dtypes.bfloat16, E5M2)
        captured = jax.jit(case.everything, compiler_options=IN_A_GRAPH if on_gpu() else None)
        plainly = jax.jit(case.everything, compiler_options={"xla_gpu_enable_command_buffer": ""} if on_gpu() else None)
        for seed in range(4):
            dy, x = case.inputs(seed)
            for one, other in zip(captured(dy, x, SCALE), plainly(dy, x, SCALE), strict=True):
                report.bits("CUDA graph", one, other, f"{case}, run {seed}")


def check_beyond_2_to_31_elements(report: Report):
    """The last rows and columns are right, and an amax that is the very last element."""
    rows, width = (2**17 + 144, 2**14) if on_gpu() else (272, 64)
    x = jax.jit(lambda key: jax.random.normal(key, (rows, width), jnp.bfloat16).at[-1, -1].set(99))(jax.random.key(0))
    cast = Cast.with_scale(E4M3, SCALE)
    pair = jax.jit(lambda x: activation_quantize(x, "relu", cast))(x)
    report.bits("beyond 2**31 elements", pair.amax, np.float32(99), "amax")
    tail = np.asarray(x[-256:])
    wanted = reference.quantize(exact(Case("relu", False, tail.shape, tail.dtype, E4M3), tail, tail), E4M3, SCALE)[0]
    report.bits("beyond 2**31 elements", pair.rowwise.values[-256:], wanted, "last rows")
    report.bits("beyond 2**31 elements", pair.columnwise.values[:, -256:], wanted.T, "last columns of the transpose")
    del pair
    gradient, sums, activated = jax.jit(lambda x: activation_backward_quantize(x, x, "relu", cast, cast))(x)
    report.bits("beyond 2**31 elements", gradient.rowwise.values[-256:], wanted, "last rows of a gradient")
    report.bits("beyond 2**31 elements", activated.values[:, -256:], wanted.T, "last columns beside it")
    exact_sums = jnp.sum(jnp.maximum(x, 0), axis=0, dtype=jnp.float32)
    close = jnp.abs(sums - exact_sums) <= 1e-5 * exact_sums
    report.expect("beyond 2**31 elements", bool(close.all()), "sums")


def check_refusals(report: Report):
    """Calls of the kernels that break their contract raise, and the message names operation and argument."""
    if not on_gpu():
        return
    x, dy = jnp.ones((32, 64), jnp.bfloat16), jnp.ones((32, 32), jnp.bfloat16)
    wide, tall, sums = (
        jax.ShapeDtypeStruct((32, 64), E4M3),
        jax.ShapeDtypeStruct((64, 32), E4M3),
        sums_results((32, 64)),
    )
    narrow, square = jax.ShapeDtypeStruct((32, 32), E4M3), jax.ShapeDtypeStruct((32, 32), E5M2)

    def call(operation, results, *args, activation="swiglu", **how):
        attributes = (GIVEN if "quantize" in operation else {}) | {"activation": activation} | how
        return jax.ffi.ffi_call(f"{TARGET}_{operation}", results)(*args, **attributes)

    def backward(matrices, *args, sums=sums):
        return call("backward_quantize", (*matrices, AMAX, AMAX, *sums), *args)

    one, row = SCALE, {"row": np.int32(1)}
    cases = [
        (lambda: call("quantize", (narrow, narrow, AMAX, AMAX), x, one, activation="tanh"), "known activation"),
        (lambda: call("quantize", (narrow, narrow, AMAX, AMAX), x[:, :63], one), "even number of columns"),
        (lambda: call("quantize", (wide, tall, AMAX, AMAX), x, one), "values must have shape [32, 32]"),
        (lambda: call("quantize", (narrow, square, AMAX, AMAX), x, one), "values_t must be float8_e4m3fn"),
        (lambda: call("quantize", (narrow, narrow, AMAX, AMAX), x, one, **row), "source must have an element 1"),
        (lambda: backward((wide, tall, narrow), x, x, one, one), "dy must have shape [32, 32]"),
        (lambda: backward((wide, tall, narrow), dy.astype(jnp.float32), x, one, one), "dy must be bfloat16"),
        (lambda: backward((wide, tall, narrow), dy, x, one, one, sums=sums[::-1]), "sums must have shape [64]"),
        (lambda: backward((wide, tall, wide), dy, x, one, one), "activated_t must have shape [32, 32]"),
        (lambda: backward((wide, tall, narrow), dy, x, one, dy), "activated_scale must be float32"),
        (lambda: call("amax", AMAX, x.astype(jnp.int32)), "x must be"),
        (lambda: call("backward_amax", AMAX, x, x), "dy must have shape [32, 32]"),
    ]
    for function, fragment in cases:
        try:
            jax.block_until_ready(jax.jit(function)())
            report.expect("refusals", False, f"nothing was raised where {fragment!r} was due")
        except jax.errors.JaxRuntimeError as error:
            report.expect(
                "refusals", fragment in str(error) and TARGET in str(error), f"{fragment!r} is not in: {error}"
            )


# ---- speed -----------------------------------------------------------------------------------------------------------


def copy_seconds(bytes_moved: int) -> float:
    """A copy that reads half of these bytes and writes the other half."""
    count = bytes_moved // 2 // 4
    return seconds_per_call(
        lambda x: x ^ jnp.uint32(1), [(jax.random.bits(jax.random.key(i), (count,), jnp.uint32),) for i in range(4)]
    )


def separately(activation: str, backward: bool):
    """The same results from XLA's activation, the cast alone and XLA's sums, with all transposes."""

    def forward(dy, x):
        return quantize_transpose(activate(x, activation), Cast.with_scale(E4M3, SCALE))

    def gradient(dy, x):
        dx, activated = activate_backward(dy, x, activation), forward(dy, x)
        pair = quantize_transpose(dx, Cast.with_scale(E5M2, SCALE))
        return pair, jnp.sum(dx, axis=0, dtype=jnp.float32), activated.columnwise

    return gradient if backward else forward


def time_everything(report: Report):
    shape = (16384, 8192)
    for activation, backward in itertools.product(
        ("gelu", "squared_relu", "gelu_exact", "swiglu", "geglu"), (False, True)
    ):
        gated = activation in plain.GATES
        case = Case(activation, backward, shape, jnp.bfloat16, E5M2 if backward else E4M3)
        wide = (shape[0], shape[1] * (2 if gated else 1))
        keys = [jax.random.split(jax.random.key(i)) for i in range(3)]
        batches = [
            (jax.random.normal(a, shape, jnp.bfloat16), jax.random.normal(b, wide, jnp.bfloat16)) for a, b in keys
        ]
        made, read = np.prod(wide if backward else shape), np.prod(wide) + (np.prod(shape) if backward else 0)
        written = 2 * made + (np.prod(shape) if backward else 0)
        sizes = {"values, transpose": 2 * int(read) + int(written), "amax alone": 2 * int(read)}
        calls = {
            "values, transpose": lambda dy, x, case=case: case.fused(dy, x, SCALE),
            "amax alone": lambda dy, x, case=case: case.amax(dy, x),
        }
        if not backward:  # as a layer calls it
            sizes["values"] = 2 * int(read) + int(made)
            calls["values"] = lambda dy, x, case=case: activation_quantize(
                x, case.activation, Cast.with_scale(E4M3, SCALE), orientations="rowwise"
            )
        copies = {name: copy_seconds(size) for name, size in sizes.items()}
        for name, call in calls.items():
            row = {
                "what": f"{'gradient of ' if backward else ''}{activation}: {name}",
                "shape": f"bfloat16{list(wide)}",
            }
            seconds = seconds_per_call(call, batches)
            row |= {"us": seconds * 1e6, "GB/s": sizes[name] / seconds / 1e9, "share of copy": copies[name] / seconds}
            if name == "values, transpose":
                row["separate us"] = seconds_per_call(separately(activation, backward), batches) * 1e6
            report.timings.append(row)
    x = [(jax.random.normal(jax.random.key(i), shape, jnp.bfloat16),) for i in range(3)]
    size, copy = 4 * int(np.prod(shape)), copy_seconds(4 * int(np.prod(shape)))
    for name, call in (
        ("quantize_transpose", quantize_transpose),
        ("quantize_transpose_sums", quantize_transpose_sums),
    ):
        seconds = seconds_per_call(lambda x, call=call: call(x, Cast.with_scale(E4M3, SCALE)), x)
        row = {"what": name, "shape": f"bfloat16{list(shape)}", "us": seconds * 1e6, "GB/s": size / seconds / 1e9}
        report.timings.append(row | {"share of copy": copy / seconds})


CHECKS = [check_formats, check_shapes, check_wrong_sums, check_another_function, check_every_bfloat16, check_infinities]
CHECKS += [
    check_orientations_and_scales,
    check_weights_of_rows,
    check_weights_of_rows_by_tile,
    check_empty,
    check_sums_of_a_cast,
    check_graphs,
    check_beyond_2_to_31_elements,
    check_refusals,
]


def main(arguments: list[str] | None = None) -> int:
    return run_script(
        Script(__file__, __doc__, CHECKS, [time_everything], target=f"{TARGET}_amax", self_test=True), arguments
    )


if __name__ == "__main__":
    sys.exit(main())

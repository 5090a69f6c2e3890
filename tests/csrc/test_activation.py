"""csrc/activation.cu on the CPU: its functions against float64, its kernels against NumPy.

What the ReLUs make is exact, and compared bit for bit. The others use approximations, which rounding to 16 bits and
then to 8 mostly hides: compared with float64 rounded the same way, few values may differ, and those by one step of FP8.
"""

import ml_dtypes
import numpy as np
import plain
import pytest
import reference
from combinations import every_pair, name_of
from emulation import ONLY_BFLOAT16, ORDERS, EmulationError, Input, Result, compile_for_cpu, planted
from entries import ACTIVATION
from reference import assert_same_bits

# A kernel that calls the functions alone: f(x) and f'(x), not rounded.
FUNCTIONS = """
#include "device/activation.cuh"
#include "device/vector.cuh"

namespace jax_fp8 {

template <typename T>
__global__ void functions_kernel(Activation activation, const float* x, int64_t count, float* y, float* slope) {
  const int64_t i = blockIdx.x * 256 + threadIdx.x;
  if (i >= count) return;
  with_activation<T, false>(activation, [&](auto function) {
    y[i] = function.value(x[i]);
    slope[i] = function.gradient(1.0f, x[i]);
  });
}

}  // namespace jax_fp8
"""
FUNCTIONS_ENTRY = """
using namespace jax_fp8;

extern "C" int functions(int64_t in_16_bits, int64_t activation, const float* x, int64_t count, float* y,
                         float* slope) {
  const auto kernel = in_16_bits ? functions_kernel<BFloat16> : functions_kernel<float>;
  kernel<<<(count + 255) / 256, 256, 0, nullptr>>>(static_cast<Activation>(activation), x, count, y, slope);
  return cudaGetLastError();
}
"""

PLAIN = list(plain.ACTIVATIONS)  # in the order of Activation
ALL = [*plain.ACTIVATIONS, *plain.GATES]
EXACT = ("relu", "squared_relu", "reglu")
SOURCES = [np.float32, ml_dtypes.bfloat16, np.float16]  # in the order of SourceType
FORMATS = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]  # in the order of Fp8Type
SCALAR = Result((), np.float32)
SCALE = np.float32(0.07)
ACTIVATED_SCALE = np.float32(0.05)  # of what a gradient makes beside
ONE_ORDER = ("forward",)  # for what another test runs in all
VALUE_ERROR = 3e-7  # of f(x), as a share of x
ADDITIONS = 2.0**-20  # of a sum of a few hundred float32, as a share of the sum of their magnitudes

# Rows and columns of y: whole tiles, tails of them, shapes without vectors, and nothing.
SHAPES = [(128, 64), (144, 80), (272, 16), (33, 65), (1, 100), (131, 1), (0, 16), (16, 0)]


def functions(activation, x, in_16_bits):
    kernels = compile_for_cpu(FUNCTIONS, FUNCTIONS_ENTRY)
    like = Result(x.shape, np.float32)
    return kernels.call("functions", in_16_bits, PLAIN.index(activation), x, x.size, like, like, orders=("forward",))


def every_bfloat16() -> np.ndarray:
    return np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize("in_16_bits", [True, False])
@pytest.mark.parametrize("activation", PLAIN)
def test_functions(activation, in_16_bits):
    """Over every bfloat16: within some 2**-22 of float64, and far from zero what the function tends to, never NaN."""
    x = every_bfloat16()
    y, slope = functions(activation, x, in_16_bits)
    near, size = np.abs(x) <= 30, np.abs(x[np.abs(x) <= 30])
    ones = np.ones(near.sum())
    exact_y, (exact_slope,) = plain.result_and_gradients(lambda x: plain.activate(x, activation), ones, x[near])
    error = np.abs(y[near] - exact_y)
    assert np.all(error <= VALUE_ERROR * size + 1e-37)  # what the hardware flushes to zero
    in_the_tail = np.abs(exact_y) > 1e-9 * size  # further out float64's own 1 + tanh has lost its digits
    assert np.all((error <= 5e-6 * np.abs(exact_y) + 1e-37)[in_the_tail])
    assert np.all(np.abs(slope[near] - exact_slope) <= 3e-7 * np.maximum(1, np.abs(exact_slope)))
    far = (np.abs(x) > 30) & np.isfinite(x)
    positive = np.maximum(x[far], 0)
    with np.errstate(over="ignore"):
        limits = (positive**2, 2 * positive) if activation == "squared_relu" else (positive, positive > 0)
    for got, limit in zip((y[far], slope[far]), limits, strict=True):
        np.testing.assert_allclose(got, limit, rtol=3e-7, atol=1e-11)
    assert np.isnan(y[np.isnan(x)]).all()


def test_a_slightly_wrong_function_is_noticed():
    """Negative control of the bounds: the two GELUs are a thousandth apart."""
    x = np.linspace(-4, 4, 256, dtype=np.float32)
    exact, _ = plain.result_and_gradients(lambda x: plain.activate(x, "gelu_exact"), x, x)
    y, _ = functions("gelu", x, True)
    assert np.max(np.abs(y - exact) / np.abs(x)) > 100 * VALUE_ERROR


def inputs(activation, shape, dtype, backward, seed=0):
    rng = np.random.default_rng(seed + sum(shape))
    rows, width = shape
    x = rng.normal(size=(rows, width * (2 if activation in plain.GATES else 1)), scale=2).astype(dtype)
    if x.size:
        x.flat[rng.integers(x.size)] = 0
        x.flat[-1] = 7  # the last one decides the amax of the activation
    return (rng.normal(size=shape).astype(dtype) if backward else None), x


def some_weights(rows) -> np.ndarray:
    """Of few bits, so that products with them are exact; no two neighbours are alike."""
    return (np.random.default_rng(rows).permutation(rows) / 128 + 0.25).astype(ml_dtypes.bfloat16).astype(np.float32)


def expected(activation, dy, x, row_weights=None):
    """y, or dx, from float64, rounded to the dtype of x."""
    output_gradient = (
        np.zeros((x.shape[0], x.shape[1] // (2 if activation in plain.GATES else 1))) if dy is None else dy
    )
    weights = 1 if row_weights is None else row_weights[:, None]
    y, (dx,) = plain.result_and_gradients(lambda x: plain.activate(x, activation) * weights, output_gradient, x)
    return (y if dy is None else dx).astype(np.float32).astype(x.dtype)


def run(
    activation,
    dy,
    x,
    dtype,
    scale=SCALE,
    orientations="both",
    changes=(),
    offset=0,
    activated_dtype=FORMATS[0],
    orders=ORDERS,
    row_weights=None,
):
    """Values, transpose, amax, scale; of a backward, sums and the activated tensor transposed; None where unwanted."""
    gated = activation in plain.GATES
    function = PLAIN.index(plain.GATES.get(activation, activation))
    rows, cols = x.shape[0], x.shape[1] // (2 if gated and dy is None else 1)
    beside = [None] * 5
    if dy is not None:
        beside[:2] = Result((-(-rows // 128), cols), np.float32), Result((cols,), np.float32)
        beside[2:] = (
            np.array(ACTIVATED_SCALE),
            FORMATS.index(activated_dtype),
            Result(dy.shape[::-1], activated_dtype, offset),
        )
    wanted = {"values": orientations != "columnwise", "values_t": orientations != "rowwise"}
    results = [Result((rows, cols), dtype, offset) if wanted["values"] else None]
    results += [Result((cols, rows), dtype, offset) if wanted["values_t"] else None, SCALAR, SCALAR]
    of = (SOURCES.index(x.dtype), function, gated, rows, x.shape[1] // (2 if gated else 1))
    arrays = [None if dy is None else Input(dy, offset * x.itemsize), Input(x, offset * x.itemsize), row_weights]
    kernels = compile_for_cpu("activation.cu", ACTIVATION, changes)
    source = np.array([9, scale], np.float32)
    got = kernels.call(
        "quantize", *arrays, *of, source, 1, FORMATS.index(dtype), *results, *beside, orders=tuple(orders)
    )
    (measured,) = kernels.call("amax", *arrays, *of, SCALAR, orders=tuple(orders))
    values = got.pop(0) if wanted["values"] else None
    values_t = got.pop(0) if wanted["values_t"] else None
    assert_same_bits(measured, got[0])
    return values, values_t, got[0], got[1], *([None, None] if dy is None else got[3:])


def check(activation, dy, x, dtype, got, scale=SCALE, row_weights=None):
    values, values_t, amax, used, sums, activated = got
    made = expected(activation, dy, x, row_weights)
    wanted, wanted_amax = reference.quantize(made, dtype, scale)
    assert_same_bits(used, scale)
    if values is not None and values_t is not None:
        assert_same_bits(values_t, values.T)
    shown = values if values is not None else values_t.T
    if activation in EXACT:
        assert_same_bits(without_signs_of_zeros(shown), without_signs_of_zeros(wanted))
        assert_same_bits(amax, wanted_amax)
    else:
        assert_few_differ(shown, wanted)
        np.testing.assert_allclose(amax, wanted_amax, rtol=1e-6 if x.dtype == np.float32 else 2.0**-8)
    if activated is not None:
        how = {"orders": ONE_ORDER, "row_weights": row_weights}
        of_the_forward = run(activation, None, x, activated.dtype, ACTIVATED_SCALE, "columnwise", **how)[1]
        assert_same_bits(activated, of_the_forward)
    if sums is not None and made.size and row_weights is None:
        own = elements(activation, dy, x, dtype)
        assert_same_bits(
            without_signs_of_zeros(shown), without_signs_of_zeros(reference.quantize(own, dtype, scale)[0])
        )
        exact, magnitudes = (array.astype(np.float64).sum(axis=0) for array in (own, np.abs(own)))
        assert np.all(np.abs(sums - exact) <= ADDITIONS * magnitudes)


def elements(activation, dy, x, dtype):
    """What the kernel sums up: the sums of a gradient that is one row, all elements beside each other."""
    (rows, width), halves = dy.shape, x.shape[1] // dy.shape[1]
    one_row = x.reshape(rows, halves, width).swapaxes(0, 1).reshape(1, -1)
    own = run(activation, dy.reshape(1, -1), one_row, dtype, orders=ONE_ORDER)[4]
    return own.reshape(halves, rows, width).swapaxes(0, 1).reshape(x.shape)


def without_signs_of_zeros(values) -> np.ndarray:
    """Float64's chain of operations ends with other signs of zeros than that of the kernel."""
    return np.where(values == 0, np.zeros((), values.dtype), values)


def assert_few_differ(actual, wanted, share=0.005):
    """FP8 values equal, but for a few that lie one step beside."""
    steps = [
        np.where(v.view(np.uint8) < 128, v.view(np.uint8).astype(int), 128 - v.view(np.uint8)) for v in (actual, wanted)
    ]
    distance = np.abs(steps[0] - steps[1])
    assert distance.max(initial=0) <= 1
    assert np.sum(distance) <= share * distance.size + 1


@pytest.mark.parametrize(("activation", "backward", "dtype"), every_pair(ALL, [False, True], SOURCES), ids=name_of)
def test_every_activation(activation, backward, dtype):
    for shape, format_, other in (((144, 80), *FORMATS), ((33, 65), *FORMATS[::-1])):
        dy, x = inputs(activation, shape, dtype, backward)
        check(activation, dy, x, format_, run(activation, dy, x, format_, activated_dtype=other))


@pytest.mark.parametrize(
    ("shape", "activation", "backward"), every_pair(SHAPES, ["squared_relu", "reglu"], [False, True]), ids=name_of
)
def test_shapes(shape, activation, backward):
    dy, x = inputs(activation, shape, ml_dtypes.bfloat16, backward)
    for offset in (0, 1):  # with and without vectors
        got = run(activation, dy, x, FORMATS[0], offset=offset)
        check(activation, dy, x, FORMATS[0], got)
        if not x.size:
            assert_same_bits(got[2], np.float32(0))
            assert backward is False or not got[4].any()


@pytest.mark.parametrize("shape", [(144, 80), (33, 65)], ids=str)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("activation", ["relu", "reglu", "swiglu"])
def test_weights_of_rows(activation, backward, shape):
    """Negative control: the weights of other rows make something else."""
    dy, x = inputs(activation, shape, ml_dtypes.bfloat16, backward)
    weights = some_weights(shape[0])
    got = run(activation, dy, x, FORMATS[0], row_weights=weights)
    check(activation, dy, x, FORMATS[0], got, row_weights=weights)
    with pytest.raises(AssertionError):
        check(activation, dy, x, FORMATS[0], got, row_weights=np.roll(weights, 1))
    of_ones = run(activation, dy, x, FORMATS[0], row_weights=np.ones_like(weights), orders=ONE_ORDER)
    for with_ones, without in zip(of_ones, run(activation, dy, x, FORMATS[0], orders=ONE_ORDER), strict=True):
        if without is not None:
            assert_same_bits(with_ones, without)


@pytest.mark.parametrize("shape", [(144, 80), (33, 65)], ids=str)
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
@pytest.mark.parametrize("orientations", ["rowwise", "columnwise"])
def test_one_orientation(orientations, activation, shape):
    _, x = inputs(activation, shape, ml_dtypes.bfloat16, False)
    both = run(activation, None, x, FORMATS[0])
    one = run(activation, None, x, FORMATS[0], orientations=orientations)
    kept, dropped = (0, 1) if orientations == "rowwise" else (1, 0)
    assert one[dropped] is None
    assert_same_bits(one[kept], both[kept])
    assert_same_bits(one[2], both[2])


@pytest.mark.parametrize("shape", [(16, 16), (3, 5)], ids=str)
def test_special_values(shape):
    """NaN stays NaN and is seen by the amax; infinities saturate; what a ReLU stops is 0 even of infinite dy."""
    x = np.zeros(shape, ml_dtypes.bfloat16)
    x.flat[:4] = [np.nan, np.inf, -np.inf, 2]
    dy = np.full(shape, np.inf, x.dtype)
    values, _, amax, *_ = run("relu", None, x, FORMATS[0])
    wanted = np.zeros(shape, np.float32)
    wanted.flat[:4] = [np.nan, np.inf, 0, 2]
    assert_same_bits(values, reference.quantize(wanted, FORMATS[0], SCALE)[0])
    assert np.isnan(amax)
    wanted.flat[:4] = [0, np.inf, 0, np.inf]
    assert_same_bits(run("relu", dy, x, FORMATS[0])[0], reference.quantize(wanted, FORMATS[0], SCALE)[0])
    values, _, amax, *_ = run("silu", None, x, FORMATS[0])
    assert_same_bits(values.ravel()[:2].view(np.uint8), np.array([0x7F, 0x7E], np.uint8))
    assert np.isnan(amax)


TILE = "device/quantize_tile.cuh"
MISTAKES = {
    "halves exchanged": ("activation.cu", "(row * kHalves + input) * width", "(row * kHalves + 1 - input) * width"),
    "a gradient at another place": (TILE, "(row * kParts + part) * width + col", "row * kParts * width + col"),
    "packed as another dtype": ("device/vector.cuh", "cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32"),
    "one warp's sums left out": (TILE, "for (int warp = 0; warp < kWarps", "for (int warp = 1; warp < kWarps"),
    "another slope": ("activation.cu", "in[2] * in[1], in[0]", "in[2] * in[1], in[1]"),
    "activated without a gate": ("activation.cu", "out[2] = value * in[1]", "out[2] = value"),
    "activated by another scale": (TILE, "multiplier_of(companion_scale)", "multiplier"),
    "activated in another format": (TILE, "with_format(results.companion.format", "with_format(kFormat"),
    "activated in another's place": (TILE, "put_patch(tile[kParts], patch", "put_patch(tile[0], patch"),
}  # fmt: skip

WEIGHTED = {
    "the weight of the first row": ("activation.cu", "weight(row + r)", "weight(row)"),
    "dy without its weight": ("activation.cu", "if constexpr (kInputs > kHalves) in[kHalves] *= weight;", ""),
    "y without its weight": ("activation.cu", "out[kMade - 1] *= weight;", ""),
}


@pytest.mark.parametrize("mistake", planted(WEIGHTED))
def test_a_mistake_in_a_weight_is_noticed(mistake):
    (dy, x), weights = inputs("reglu", (144, 80), ml_dtypes.bfloat16, True), some_weights(144)
    changes = (WEIGHTED[mistake], *ONLY_BFLOAT16)
    with pytest.raises((AssertionError, EmulationError)):
        check("reglu", dy, x, FORMATS[1], run("reglu", dy, x, FORMATS[1], changes=changes, row_weights=weights),
              row_weights=weights)  # fmt: skip


@pytest.mark.parametrize("mistake", planted(MISTAKES))
def test_a_mistake_is_noticed(mistake):
    dy, x = inputs("reglu", (144, 80), ml_dtypes.bfloat16, True)
    with pytest.raises((AssertionError, EmulationError)):
        check("reglu", dy, x, FORMATS[1], run("reglu", dy, x, FORMATS[1], changes=(MISTAKES[mistake], *ONLY_BFLOAT16)))

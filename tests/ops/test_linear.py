"""`linear`: exactly its three GEMMs of quantized operands, close to the layer without FP8,
and what it keeps for its backward.
"""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import reference
from reference import assert_close, assert_same_bits

from jax_fp8.core.formats import E4M3, E5M2, Format
from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.core.fp8_gemm import Fp8Gemm, Record
from jax_fp8.core.recipe import CurrentScaling, DelayedScaling
from jax_fp8.kernels.gemm import matmul
from jax_fp8.ops import passes
from jax_fp8.ops.linear import linear
from jax_fp8.ops.parameters import LinearParameters

pytestmark = pytest.mark.versions

BATCH, SEQUENCE, K, N = 2, 24, 32, 48
FORMATS = {"hybrid": Format(forward=E4M3, backward=E5M2), "e4m3": Format(forward=E4M3, backward=E4M3)}


def array(seed, *shape, dtype=ml_dtypes.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(dtype))


X, DY = array(0, BATCH, SEQUENCE, K), array(1, BATCH, SEQUENCE, N)
PARAMETERS = LinearParameters(array(2, K, N, dtype=np.float32), array(3, N, dtype=np.float32))
ROWS, OUTPUT_GRADIENTS = np.asarray(X).reshape(-1, K), np.asarray(DY).reshape(-1, N)


def scales(fp8_format=FORMATS["hybrid"]) -> np.ndarray:
    """What current scaling must find, by the oracle."""
    dtypes = (fp8_format.forward, fp8_format.forward, fp8_format.backward)
    return np.array(
        [
            reference.current_scale(reference.amax(a), dtype)
            for a, dtype in zip((X, PARAMETERS.kernel, DY), dtypes, strict=True)
        ]
    )


def delayed(scale, fp8_format=FORMATS["hybrid"], amax_ref=None) -> Fp8Gemm:
    return Fp8Gemm(DelayedScaling(fp8_format=fp8_format), "mlp/up", jnp.asarray(scale), Record(amax_ref))


def current(**settings) -> Fp8Gemm:
    return Fp8Gemm(CurrentScaling(**settings), "mlp/up")


def run(gemm, x=X, parameters=PARAMETERS, dy=DY, dtype=jnp.bfloat16, **options):
    """y, the amaxes, and the gradients of x and of the parameters."""
    fn = functools.partial(linear, gemm=gemm, dtype=dtype, **options)
    (y, amaxes), pullback = jax.vjp(fn, x, parameters)
    return y, amaxes, *pullback((dy, amaxes if amaxes is None else jnp.zeros_like(amaxes)))


def quantized(x, dtype, scale) -> Fp8Array:
    """By the oracle."""
    return Fp8Array(jnp.asarray(reference.quantize(x, dtype, scale)[0]), jnp.float32(scale))


def transposed(array: Fp8Array) -> Fp8Array:
    return Fp8Array(array.values.T, array.scale)


@pytest.mark.parametrize("fp8_format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("scale", ["own", "another"])
def test_the_three_gemms_of_quantized_operands_exactly(fp8_format, scale):
    scale = scales(fp8_format) if scale == "own" else np.float32([0.013, 0.7, 1e-4])
    x = quantized(ROWS, fp8_format.forward, scale[0])
    kernel = quantized(PARAMETERS.kernel, fp8_format.forward, scale[1])
    dy = quantized(OUTPUT_GRADIENTS, fp8_format.backward, scale[2])
    y, amaxes, dx, gradients = run(delayed(scale, fp8_format))
    assert_same_bits(y.reshape(-1, N), matmul(x, transposed(kernel), bias=PARAMETERS.bias))
    assert_same_bits(amaxes, np.array([reference.amax(X), reference.amax(PARAMETERS.kernel)]))
    assert_same_bits(dx.reshape(-1, K), matmul(dy, kernel))
    assert_same_bits(gradients.kernel, matmul(transposed(x), transposed(dy), dtype=jnp.float32))
    assert_close(
        gradients.bias, OUTPUT_GRADIENTS.astype(np.float64).sum(0), "float32"
    )  # of dy itself, not of its FP8 values
    with pytest.raises(AssertionError, match="elements differ"):  # the other format would show
        assert_same_bits(
            dx.reshape(-1, K),
            matmul(quantized(OUTPUT_GRADIENTS, E4M3 if fp8_format.backward == E5M2 else E5M2, scale[2]), kernel),
        )


def test_current_scaling_is_delayed_scaling_with_this_tensors_scales():
    jax.tree.map(assert_same_bits, run(current()), run(delayed(scales())))
    with pytest.raises(AssertionError):
        jax.tree.map(assert_same_bits, run(current()), run(current(power_2_scale=True)))


def test_power_2_scale_quantizes_with_powers_of_two():
    powers = np.exp2(np.ceil(np.log2(scales())))
    jax.tree.map(assert_same_bits, run(current(power_2_scale=True)), run(delayed(powers.astype(np.float32))))


def test_a_warm_start_measures_with_the_margin():
    recipe = DelayedScaling(margin=2)
    warm = Fp8Gemm(recipe, "mlp/up")
    jax.tree.map(assert_same_bits, run(warm), run(delayed(4 * scales())))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_against_float64(dtype):
    y, _, dx, gradients = run(current(), dy=DY.astype(dtype), dtype=dtype)
    expected_y, expected_dx, expected_dkernel = reference.linear(ROWS, PARAMETERS.kernel, OUTPUT_GRADIENTS)
    assert y.dtype == dtype
    assert_close(y.reshape(-1, N), expected_y + np.asarray(PARAMETERS.bias, np.float64), "linear")
    assert_close(dx.reshape(-1, K), expected_dx, "linear_gradient")
    assert_close(gradients.kernel, expected_dkernel, "linear_gradient")
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(y.reshape(-1, N), expected_y, "linear")  # without the bias


@pytest.mark.parametrize("frozen", [np.float32(1e3), np.float32(1e-6)], ids=["underflow", "saturation"])
def test_a_wrong_scale_would_be_noticed(frozen):
    """Negative control of the tolerances: too coarse a scale, and one that clips."""
    y, _, dx, gradients = run(delayed(np.full(3, frozen)))
    expected_y, expected_dx, expected_dkernel = reference.linear(ROWS, PARAMETERS.kernel, OUTPUT_GRADIENTS)
    for actual, expected, kind in (
        (y.reshape(-1, N), expected_y + np.asarray(PARAMETERS.bias, np.float64), "linear"),
        (dx.reshape(-1, K), expected_dx, "linear_gradient"),
        (gradients.kernel, expected_dkernel, "linear_gradient"),
    ):
        with pytest.raises(AssertionError, match="relative error"):
            assert_close(actual, expected, kind)


def test_without_scaling_it_is_a_plain_product():
    y, amaxes, dx, gradients = run(None)
    expected_y, expected_dx, expected_dkernel = reference.linear(ROWS, PARAMETERS.kernel, OUTPUT_GRADIENTS)
    assert amaxes is None
    assert_close(y.reshape(-1, N), expected_y + np.asarray(PARAMETERS.bias, np.float64), "bfloat16")
    assert_close(dx.reshape(-1, K), expected_dx, "bfloat16")
    assert_close(gradients.kernel, expected_dkernel, "bfloat16")


def test_without_bias():
    y, _, dx, gradients = run(current(), parameters=LinearParameters(PARAMETERS.kernel, None))
    with_bias = run(current(), parameters=LinearParameters(PARAMETERS.kernel, jnp.zeros(N)))
    assert gradients.bias is None
    jax.tree.map(assert_same_bits, (y, dx, gradients.kernel), (with_bias[0], with_bias[2], with_bias[3].kernel))


def test_the_forward_alone_is_the_same():
    """It quantizes x in one orientation only; nothing else may differ."""
    y, amaxes = linear(X, PARAMETERS, current())
    jax.tree.map(assert_same_bits, (y, amaxes), run(current())[:2])


def test_jit_changes_the_order_of_sums_only():
    y, amaxes, dx, gradients = jax.jit(functools.partial(run, current()))()
    eager_y, eager_amaxes, eager_dx, eager_gradients = run(current())
    assert_same_bits(amaxes, eager_amaxes)
    assert_close(y, eager_y, "gemm_bfloat16")
    assert_close(dx, eager_dx, "gemm_bfloat16")
    jax.tree.map(lambda actual, expected: assert_close(actual, expected, "float32"), gradients, eager_gradients)


def test_leading_dims_are_rows():
    flat = run(current(), x=X.reshape(-1, K), dy=DY.reshape(-1, N))
    y, amaxes, dx, gradients = run(current())
    assert (y.shape, dx.shape) == ((BATCH, SEQUENCE, N), (BATCH, SEQUENCE, K))
    jax.tree.map(assert_same_bits, (y.reshape(-1, N), amaxes, dx.reshape(-1, K), gradients), flat)


@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_have_the_dtypes_of_the_parameters(param_dtype):
    parameters = jax.tree.map(lambda leaf: leaf.astype(param_dtype), PARAMETERS)
    _, _, dx, gradients = run(current(), x=X.astype(jnp.float32), parameters=parameters)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype(param_dtype)}
    assert dx.dtype == jnp.float32  # of x as it was given


@pytest.mark.parametrize("param_dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_of_16_bit_params_are_rounded_once(param_dtype):
    short = jax.tree.map(lambda leaf: leaf.astype(param_dtype), PARAMETERS)
    same_values = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), short)
    gradients, exact = (run(current(), parameters=parameters)[-1] for parameters in (short, same_values))
    jax.tree.map(lambda rounded, whole: assert_same_bits(rounded, whole.astype(param_dtype)), gradients, exact)
    assert np.any(np.asarray(gradients.kernel, np.float32) != np.asarray(exact.kernel))  # there was something to round


def test_the_backward_records_all_three_amaxes():
    ref = jax.new_ref(jnp.float32([0, 1000, 0]))
    run(delayed(scales(), amax_ref=ref))
    expected = np.array([reference.amax(X), 1000, reference.amax(DY)], np.float32)
    assert_same_bits(ref[...], expected)


def kept(fn, *args) -> list:
    """The shapes and dtypes of all that a backward pass keeps."""
    return [
        (leaf.shape, leaf.dtype)
        for leaf in jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(fn, *args)[1], *args))
        if leaf.size > 2
    ]


def test_the_backward_keeps_x_and_kernel_in_fp8_and_nothing_else():
    scaling = delayed(scales())
    residuals = kept(lambda x, parameters: linear(x, parameters, scaling), X, PARAMETERS)
    assert sorted(shape for shape, dtype in residuals if dtype == E4M3) == [(K, N), (K, BATCH * SEQUENCE)]
    assert [(shape, dtype) for shape, dtype in residuals if dtype != E4M3] in ([], [((3,), jnp.float32)])  # the scales
    plain = kept(lambda x, parameters: linear(x, parameters, None), X, PARAMETERS)
    assert ((BATCH, SEQUENCE, K), jnp.bfloat16) in plain  # and this is how a bfloat16 x would be seen


@pytest.mark.parametrize("scaling", [current(), delayed(scales())], ids=["current", "delayed"])
def test_recomputing_keeps_x_itself_and_gives_the_same_bits(scaling):
    jax.tree.map(assert_same_bits, run(scaling, recompute=True), run(scaling))
    residuals = kept(lambda x, parameters: linear(x, parameters, scaling, recompute=True), X, PARAMETERS)
    assert [shape for shape, dtype in residuals if dtype == E4M3] == [(K, N)]
    assert [shape for shape, dtype in residuals if dtype == jnp.bfloat16] == [(BATCH * SEQUENCE, K)]


@pytest.mark.parametrize("scaling", [current(), None], ids=["fp8", "plain"])
def test_a_residual_is_added_before_the_rounding_and_its_gradient_is_that_of_the_result(scaling):
    residual = 16 * array(4, BATCH, SEQUENCE, N)
    (y, _), pullback = jax.vjp(lambda residual: linear(X, PARAMETERS, scaling, residual=residual), residual)
    without = linear(X, PARAMETERS, scaling, jnp.float32)[0]
    assert_close(y, without + residual.astype(jnp.float32), "gemm_bfloat16" if scaling else "bfloat16")
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(y, residual, "bfloat16")
    assert_same_bits(pullback((DY, jax.tree.map(jnp.zeros_like, linear(X, PARAMETERS, scaling)[1])))[0], DY)


WIDTHS = [(16, 16, 16), (32, 16), (48,)]


def in_parts(array, widths):
    return tuple(jnp.split(array, np.cumsum(widths)[:-1], axis=-1))


def side_by_side(parameters, widths) -> LinearParameters:
    return LinearParameters(*(in_parts(leaf, widths) for leaf in (parameters.kernel, parameters.bias)))


@pytest.mark.parametrize("smallest_wgrad", [0, 2**30], ids=["wgrads", "one wgrad"])
@pytest.mark.parametrize("gemm", [current(), delayed(scales()), None], ids=["current", "delayed", "plain"])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_kernels_side_by_side_are_one_kernel(widths, gemm, smallest_wgrad, monkeypatch):
    """To the bit, with a result a kernel and the gradients of each where they belong."""
    monkeypatch.setattr(passes, "SMALLEST_WGRAD", smallest_wgrad)
    y, amaxes, dx, gradients = run(gemm)
    expected = in_parts(y, widths), amaxes, dx, side_by_side(gradients, widths)
    got = run(gemm, parameters=side_by_side(PARAMETERS, widths), dy=in_parts(DY, widths))
    jax.tree.map(assert_same_bits, got, expected)
    if len(widths) > 1:  # every kernel counts
        dy = in_parts(DY.at[..., -widths[-1] :].set(0), widths)
        with pytest.raises(AssertionError):
            jax.tree.map(assert_same_bits, run(gemm, parameters=side_by_side(PARAMETERS, widths), dy=dy), expected)


@pytest.mark.parametrize(
    ("parameters", "options", "message"),
    [
        (side_by_side(PARAMETERS, (12, 12, 12, 12)), {}, "takes 1 to 3 matrices side by side, got 4"),
        (
            side_by_side(PARAMETERS, (32, 16)),
            {"residual": DY},
            "a residual must have the shape of the result, .* got",
        ),
    ],
)
def test_errors_of_kernels_side_by_side(parameters, options, message):
    with pytest.raises(ValueError, match=message):
        linear(X, parameters, current(), **options)


@pytest.mark.parametrize("split_accumulator", [("dgrad", "wgrad"), (), ("fprop",)])
def test_only_the_named_gemms_split_their_accumulator(split_accumulator, with_kernels):
    step = jax.jit(functools.partial(run, current(split_accumulator=split_accumulator)))
    text = step.trace().lower(lowering_platforms=("cuda",)).as_text()
    fast = {}
    for line in text.splitlines():
        if "@jax_fp8_gemm" in line:
            shape = tuple(
                map(int, re.search(r"-> tuple<tensor<(\d+)x(\d+)x|-> \(tensor<(\d+)x(\d+)x", line).group(3, 4))
            )
            fast[shape] = "fast_accumulation = true" in line
    names = {(BATCH * SEQUENCE, N): "fprop", (BATCH * SEQUENCE, K): "dgrad", (K, N): "wgrad"}
    assert {names[shape]: is_fast for shape, is_fast in fast.items()} == {
        name: name not in split_accumulator for name in names.values()
    }


def test_rows_must_be_a_multiple_of_16_for_the_gradient():
    message = (
        r"mlp/up: the weight gradient contracts over batch \* sequence, which must be a multiple of 16, got 15; "
        "change the batch"
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: run(current(), x=array(0, 15, K), dy=array(0, 15, N)))
    assert jax.eval_shape(lambda: linear(array(0, 15, K), PARAMETERS, current()))[0].shape == (
        15,
        N,
    )  # the forward alone needs no such thing


@pytest.mark.parametrize(("k", "n"), [(24, 48), (32, 40)])
def test_features_must_be_multiples_of_16(k, n):
    with pytest.raises(
        ValueError, match=rf"k and n to be multiples of 16, got a \(16, {k}\) and b \({n}, {k}\); pad the input"
    ):
        jax.eval_shape(
            lambda: linear(array(0, 16, k), LinearParameters(array(1, k, n, dtype=np.float32), None), current())
        )


def test_x_and_kernel_must_fit():
    with pytest.raises(ValueError, match=r"matmul needs a \(m, k\) and b \(n, k\)"):
        jax.eval_shape(lambda: linear(array(0, 16, 16), PARAMETERS, current()))

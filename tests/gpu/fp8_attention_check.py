"""FP8 attention by cuDNN on a GPU: against its reference and against float32, and its time next to bfloat16.

    python tests/gpu/fp8_attention_check.py --output fp8_attention_check.json
    python tests/gpu/fp8_attention_check.py --only check_passes                   # one part alone, or some
    python tests/gpu/fp8_attention_check.py --self-test                           # the reference, on a CPU

cuDNN's results are compared with those of the `jnp` reference on the same device: E4M3 values with the same scales,
amaxes, and the statistics of the softmax. Both are compared with attention in float32. cuDNN rounds weights relative to
the largest score so far, the reference relative to the largest of all, so their bits differ. The script times the
forward and both passes, with and without the casts around them. Ends with one line per timing and per group of checks,
and with exit code 1 if a check failed.
"""

import sys
from functools import partial
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

import reference
from gpu.kernel_check import IN_A_GRAPH, seconds_per_call
from gpu.report import Report, Script, on_gpu, run_script

from jax_fp8.core.formats import E4M3
from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.core.fp8_gemm import Fp8Gemm
from jax_fp8.core.recipe import DelayedScaling
from jax_fp8.kernels import fp8_attention as kernel
from jax_fp8.kernels.fp8_attention import GRADIENTS, attend, attend_backward
from jax_fp8.kernels.quantize import quantize
from jax_fp8.ops.attention import attention
from jax_fp8.ops.fp8_attention import AttentionGemms, fp8_attention

BATCH, HEADS, HEAD_DIM = 2, 4, 128
LIKE_REFERENCE = 0.05  # relative: weights that are rounded relative to another maximum are 0.037 apart on average
LIKE_FLOAT32 = 0.06  # one rounding inside and one of the result are 0.037 on average
WRONG = 0.2  # what a control must exceed
SIZES = 1.5, 1.0, 0.01, 1e-4  # of queries, keys, values and output gradients: a scale left out shows
ORDER_OF_JAX = {
    "BACKWARD_SCALES": ("query", "key", "value", "output", "doutput", "weights", "dscores"),
    "BACKWARD_MULTIPLIERS": ("weights", "dquery", "dkey", "dvalue", "dscores"),
}
CASES = [(True, HEADS), (True, HEADS // 2), (False, HEADS), (False, 1)]


def seq() -> int:
    return 1024 if on_gpu() else 128


def operands(kv_heads: int, tokens: int, batch: int = BATCH, heads: int = HEADS) -> list[Fp8Array]:
    """Query, key, value and the gradient of the output."""
    found = []
    for number, (size, of) in enumerate(zip(SIZES, (heads, kv_heads, kv_heads, heads), strict=True)):
        x = size * jax.random.normal(jax.random.key(number), (batch, tokens, of, HEAD_DIM))
        found.append(quantize(x, E4M3, jnp.max(jnp.abs(x)) / 448))
    return found


def exact(arrays, causal):
    """Output and gradients in float32, computed from the dequantized arrays."""
    query, key, value, doutput = (of.dequantize() for of in arrays)
    with jax.default_matmul_precision("highest"):
        output, pull = jax.vjp(partial(attention, causal=causal, implementation="xla"), query, key, value)
        return output, *pull(doutput)


def scales_of(amaxes) -> tuple[jax.Array, ...]:
    return tuple(jnp.where(amax > 0, amax / 448, 1) for amax in amaxes)


def known_scales(arrays, causal, by_reference) -> tuple[jax.Array, ...]:
    """Of each of GRADIENTS: those of dquery and dkey are known once that of dscores is."""
    measure = jax.jit(lambda arrays, scales: passes(arrays, scales, causal, by_reference)[3])
    found = measure(arrays, (jnp.float32(1),) * len(GRADIENTS))
    return scales_of(measure(arrays, scales_of(found)))


def passes(arrays, scales, causal, by_reference=False):
    """Output, statistics, gradients and amaxes; by the kernels, or by the reference wherever this runs."""
    query, key, value, doutput = arrays
    if not by_reference:
        output, statistics = attend(query, key, value, causal=causal)
        options = {"scales": scales, "causal": causal}
        return output, statistics, *attend_backward(query, key, value, output, statistics, doutput, **options)
    grouped = partial(kernel._grouped, kv_heads=key.shape[2])
    three = grouped(query.values), key.values, value.values
    known = query.scale, key.scale, value.scale
    with jax.default_matmul_precision("highest"):
        values, statistics = kernel._forward_reference(causal, *three, *known, split={})
        output = Fp8Array(kernel._heads(values), kernel._output_scale(value.scale))
        rest = values, grouped(doutput.values), statistics, *known, output.scale, doutput.scale, *scales
        dquery, *others = kernel._backward_reference(causal, *three, *rest, split={})
    found = zip((kernel._heads(dquery), *others[:2]), scales[1:], strict=True)
    return output, statistics, tuple(Fp8Array(*of) for of in found), tuple(others[2:])


def check_passes(report: Report):
    """Every result of the kernels."""
    for causal, kv_heads in CASES:
        what, arrays = f"{causal=} {kv_heads=}", operands(kv_heads, seq())
        scales = known_scales(arrays, causal, by_reference=True)
        runs = [jax.jit(partial(passes, causal=causal, by_reference=of))(arrays, scales) for of in (False, True)]
        (output, statistics, gradients, amaxes), (by_reference, of_reference, others, wanted) = runs
        in_float32 = jax.jit(partial(exact, causal=causal))(arrays)
        names = "output", "dquery", "dkey", "dvalue"
        found = zip(names, (output, *gradients), (by_reference, *others), in_float32, strict=True)
        for name, got, like, expected in found:
            for group, other, limit in (
                ("like the reference", like.dequantize(), LIKE_REFERENCE),
                ("like float32", expected, LIKE_FLOAT32),
            ):
                error = reference.relative_error(got.dequantize(), other)
                report.worst[f"{name}, {group}"] = max(error, report.worst.get(f"{name}, {group}", 0.0))
                report.expect(group, error <= limit, f"{what}: {name} is off by {error:.1e}")
        off = np.abs(np.asarray(statistics) - np.asarray(of_reference)).max()
        report.expect("statistics", off < 2e-3, f"{what}: log of the sum is off by {off:.1e}")
        for name, got, expected in zip(GRADIENTS, amaxes, wanted, strict=True):
            error = abs(float(got) / float(expected) - 1)
            report.worst[f"amax of {name}"] = max(error, report.worst.get(f"amax of {name}", 0.0))
            report.expect("amaxes", error < 0.05, f"{what}: that of {name} is {got} instead of {expected}")
        again = jax.jit(partial(passes, causal=causal))(arrays, (*scales[:2], scales[2] / 4, scales[3]))[3]
        same = abs(float(again[2]) / float(amaxes[2]) - 1)
        report.expect("an amax is of what is cast", same < 1e-2, f"{what}: that of dkey moved by {same:.1e}")


def check_controls(report: Report):
    """Another scale of any input changes the result, so no scale is ignored or swapped."""
    arrays = operands(HEADS // 2, seq())
    scales = tuple(map(jnp.float32, (1e-8, 1e-7, 1e-7, 1e-6)))
    run = jax.jit(lambda *of: passes(of, scales, True))
    expected = run(*arrays)
    for place, name in enumerate(("query", "key", "value", "doutput")):
        other = [Fp8Array(of.values, 2 * of.scale) if at == place else of for at, of in enumerate(arrays)]
        found = run(*other)
        pairs = zip((found[0], *found[2]), (expected[0], *expected[2]), strict=True)
        off = [reference.relative_error(one.dequantize(), wanted.dequantize()) for one, wanted in pairs]
        report.expect("controls", max(off) > WRONG, f"{name} twice as large moves results by {max(off):.1e}")


def check_order(report: Report):
    """JAX's own lowering orders the scales differently; with that order gradients are wrong."""
    if not on_gpu():
        return
    arrays = operands(HEADS, seq())
    scales = known_scales(arrays, True, by_reference=True)
    wanted = jax.jit(partial(passes, causal=True, by_reference=True))(arrays, scales)[2]
    own = {name: getattr(kernel, name) for name in ORDER_OF_JAX}
    for order, like_xla in ((own, True), (ORDER_OF_JAX, False)):
        jax.clear_caches()
        with mock.patch.multiple(kernel, **order):
            found = jax.jit(lambda arrays, scales: passes(arrays, scales, True))(arrays, scales)[2]
        pairs = zip(found, wanted, strict=True)
        off = [reference.relative_error(got.dequantize(), expected.dequantize()) for got, expected in pairs]
        is_like = all(error <= LIKE_REFERENCE for error in off)  # NaN is not
        report.expect("order of scales", is_like == like_xla, f"{order}: gradients are off by {off}")
    jax.clear_caches()


def check_apart(report: Report):
    """The backward gives each sequence its own gradients, and the largest of all amaxes, whether they are one call or a
    call each.
    """
    *arrays, doutput = operands(HEADS // 2, seq(), batch=3)
    sizes = jnp.array([1.0, 0.5, 0.25])[:, None, None, None]  # the largest amax is one sequence's
    arrays.append(Fp8Array((doutput.values.astype(jnp.float32) * sizes).astype(E4M3), doutput.scale))
    scales = known_scales(arrays, True, by_reference=True)
    _, _, wanted, amaxes = jax.jit(partial(passes, causal=True, by_reference=True))(arrays, scales)
    for apart in (0, seq() + 1):
        jax.clear_caches()
        with mock.patch.object(kernel, "SEQUENCES_APART", apart):
            found = jax.jit(lambda arrays, scales: passes(arrays, scales, True))(arrays, scales)
        for name, got, expected in zip(GRADIENTS[1:], found[2], wanted, strict=True):
            one, other = got.dequantize(), expected.dequantize()
            error = reference.relative_error(one, other)
            report.expect("sequences apart", error <= LIKE_REFERENCE, f"from {apart}: {name} is off by {error:.1e}")
            error = reference.relative_error(jnp.roll(one, 1, axis=0), other)
            report.expect("controls", error > WRONG, f"from {apart}: {name} of another sequence is off by {error:.1e}")
        for name, got, expected in zip(GRADIENTS, found[3], amaxes, strict=True):
            error = abs(float(got) / float(expected) - 1)
            report.expect("amaxes", error < 0.05, f"from {apart}: that of {name} is {got} instead of {expected}")
    jax.clear_caches()


def check_weights(report: Report):
    """The weights need only a constant scale: cuDNN's amax of them is at most 1. The output is in range."""
    query, key, value, _ = operands(HEADS, seq())
    if on_gpu():
        stats = jax.ShapeDtypeStruct((BATCH, HEADS, seq()), jnp.float32)
        shape = jax.ShapeDtypeStruct((BATCH, HEADS, seq(), HEAD_DIM), E4M3)
        results = shape, kernel.AMAX, kernel.AMAX, stats, kernel.WORKSPACE
        config = kernel._config(True, query.shape, seq(), kernel.FORWARD_PRODUCTS)
        weights = float(kernel.WEIGHTS_SCALE)
        scales = query.scale, key.scale, value.scale, weights, 1 / weights, 1 / kernel._output_scale(value.scale)
        call = kernel._call("__cudnn$fmhaSoftmaxF8", results, 1, config)
        run = jax.jit(lambda *of: call(*of[:3], *map(kernel._operand, of[3:])))
        largest = float(run(query.values, key.values, value.values, *scales)[1].reshape(()))
        report.worst["weights' amax"] = largest
        report.expect("weights are at most 1", 0 < largest <= 1.01, f"got {largest}")
    ones = quantize(jnp.full(value.shape, 3.0), E4M3, jnp.float32(3 / 448))
    output, _ = jax.jit(partial(attend, causal=False))(query, key, ones)
    error = reference.relative_error(output.dequantize(), np.full(output.shape, 3.0))
    report.expect("the output's range", error < LIKE_REFERENCE, f"a mean of equal values is off by {error:.1e}")


def gemms_of(scales=(None, None, None)) -> AttentionGemms:
    return AttentionGemms(*(Fp8Gemm(DelayedScaling(), "layer", of, is_recorded=True) for of in scales))


def check_the_operation(report: Report):
    """bfloat16 in and out, all scales from own amaxes; as a CUDA graph, too."""

    def run(arrays):
        *three, doutput = arrays
        attended, pull = jax.vjp(lambda *of: fp8_attention(*of, gemms_of(), causal=True)[0], *three)
        return attended, *pull(doutput)

    for kv_heads in (HEADS, HEADS // 2):
        arrays = [of.dequantize(jnp.bfloat16) for of in operands(kv_heads, seq())]
        found = jax.jit(run)(arrays)
        in_a_graph = jax.jit(run, compiler_options=IN_A_GRAPH if on_gpu() else None)(arrays)
        expected = jax.jit(partial(exact, causal=True))([Fp8Array(of, jnp.float32(1)) for of in arrays])
        for name, got, other, wanted in zip(("result", "dq", "dk", "dv"), found, in_a_graph, expected, strict=True):
            error = reference.relative_error(got, wanted)
            report.worst[f"operation, {name}"] = max(error, report.worst.get(f"operation, {name}", 0.0))
            report.expect("the operation", error < 1.5 * LIKE_FLOAT32, f"{kv_heads=}: {name} is off by {error:.1e}")
            error = reference.relative_error(other, got)
            report.expect("in a CUDA graph", error < LIKE_REFERENCE, f"{kv_heads=}: {name} is off by {error:.1e}")


QUERY_HEADS, KEY_HEADS = 32, 8


def time_attention(report: Report, sequences: int, tokens: int):
    """Both in the shapes of Llama 3 8B; of FP8 the operation, and its kernels alone."""
    batches = [operands(KEY_HEADS, tokens, sequences, QUERY_HEADS) for _ in range(2)]
    in_16_bits = [tuple(of.dequantize(jnp.bfloat16) for of in arrays) for arrays in batches]
    scales = known_scales(batches[0], True, by_reference=False)
    query, key, value, doutput = (of.scale for of in batches[0])
    dscores, dquery, dkey, dvalue = scales
    of_e5m2 = np.float32(1 / 128)
    gemms = gemms_of(
        (
            jnp.stack([query, key, dscores * of_e5m2]),
            jnp.stack([jnp.float32(1), value, doutput * of_e5m2]),
            jnp.stack([dquery, dkey, dvalue * of_e5m2]),
        )
    )

    def forward_and_backward(attend_to, query, key, value, gradient):
        attended, pull = jax.vjp(attend_to, query, key, value)
        return attended, *pull(gradient)

    def by_kernels(query, key, value, doutput):
        return passes((query, key, value, doutput), scales, True)

    in_bf16 = partial(attention, causal=True, implementation="cudnn")
    in_fp8 = lambda *of: fp8_attention(*of, gemms, causal=True, implementation="cudnn")[0]  # noqa: E731
    calls = {
        "forward, bf16": (lambda *of: in_bf16(*of[:3]), in_16_bits),
        "forward, FP8": (lambda *of: in_fp8(*of[:3]), in_16_bits),
        "forward, FP8, kernel alone": (lambda *of: attend(*of[:3], causal=True), batches),
        "both passes, bf16": (partial(forward_and_backward, in_bf16), in_16_bits),
        "both passes, FP8": (partial(forward_and_backward, in_fp8), in_16_bits),
        "both passes, FP8, kernels alone": (by_kernels, batches),
    }
    base = 0.0
    for what, (call, arrays) in calls.items():
        seconds = seconds_per_call(call, arrays)
        base = seconds if what.endswith("bf16") else base
        products = 2 if what.startswith("forward") else 7  # of tokens by tokens, half of which nobody sees
        operations = products * 2 * sequences * tokens**2 * QUERY_HEADS * HEAD_DIM / 2
        row = {"us": seconds * 1e6, "TFLOP/s": operations / seconds / 1e12, "of bf16": base / seconds}
        report.timings.append({"what": what, "shape": f"{sequences} x {tokens}", **row})


def time_2048(report: Report):
    time_attention(report, 8, 2048)


def time_8192(report: Report):
    for sequences in (1, 2):
        time_attention(report, sequences, 8192)


def time_16384(report: Report):
    time_attention(report, 1, 16_384)


CHECKS = [check_passes, check_controls, check_order, check_apart, check_weights, check_the_operation]


def main(arguments: list[str] | None = None) -> int:
    script = Script(__file__, __doc__, CHECKS, [time_2048, time_8192, time_16384], self_test=True)
    return run_script(script, arguments)


if __name__ == "__main__":
    sys.exit(main())

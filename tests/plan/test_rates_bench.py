"""The rates of one GPU: what is counted, by a clock that is made up, and what the programs become for an H200.

Times need a device.
"""

from functools import partial

import h200
import jax
import jax.numpy as jnp
import pytest

from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.kernels.tuned_gemms import GemmProblem
from jax_fp8.plan import rates_bench
from jax_fp8.plan.rates import RateTable
from jax_fp8.plan.rates_bench import attend, attend_in_fp8, attention_operations, measure_rates, products
from jax_fp8.tune.gemm_bench import MOST_COPIES, count_copies_and_calls

SMALL = {"sizes": (16, 32), "copied": 4096, "sequences": ((1, 16, 2, 8), (1, 32, 2, 8))}


class Clock:
    """A second goes by whenever it is asked."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1
        return self.now


def test_rates_are_operations_or_bytes_of_a_call_by_its_seconds():
    """A sample is a second, in which ten programs run."""
    lines = []
    found = measure_rates(Clock(), **SMALL, report=lines.append)
    seconds = 0.1
    for name, accumulation in (("fp8", "fast"), ("fp8_split", "split")):
        for (operations, rate), size in zip(found[name], (16, 32), strict=True):
            problem = GemmProblem(size, size, size, *["float8_e4m3fn"] * 2, "bfloat16", False, False, accumulation)
            assert operations == 2 * size**3
            assert rate == pytest.approx(operations * count_copies_and_calls(problem)[1] / seconds)
    assert [size for size, _ in found["bf16"]] == [2 * 16**3, 2 * 32**3]
    assert [rate for _, rate in found["bf16"]] == pytest.approx([2 * n**3 * MOST_COPIES / seconds for n in (16, 32)])
    assert found["memory"] == pytest.approx(0.9 * 2 * 4096 / seconds)
    for name in ("attention", "attention_fp8"):
        assert [tokens for tokens, _ in found[name]] == [16, 32]
        assert [rate for _, rate in found[name]] == pytest.approx(
            [7 * 2 * (n * n / 2) * 2 * 8 / seconds for n in (16, 32)]
        )
    assert [line.split()[0] for line in lines] == list(found)
    renewed = RateTable.for_gpu("h200").renewed("here", "measured here", **found)
    assert renewed.rates.fp8 == found["fp8"] and renewed.sources["memory"] == "measured here"


def test_each_accumulation_is_measured_by_itself(monkeypatch):
    asked = []

    class Bench:
        def __init__(self, problem, clock):
            asked.append((problem.accumulation, problem.m, problem.n, problem.k))

        def seconds(self, candidate):
            assert candidate == 0
            return 1e-6

    monkeypatch.setattr(rates_bench, "GemmBench", Bench)
    assert measure_rates(Clock(), **SMALL)["fp8"] == ((2 * 16**3, 2 * 16**3 / 1e-6), (2 * 32**3, 2 * 32**3 / 1e-6))
    assert asked == [(accumulation, n, n, n) for accumulation in ("fast", "split") for n in (16, 32)]


@pytest.mark.skipif(h200.missing_reason() is not None, reason=str(h200.missing_reason()))
def test_the_programs_for_a_gpu_do_what_is_counted(monkeypatch):
    """Every product by cuBLAS, and attention by cuDNN, once forward and once backward."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91900)
    on = h200.on_one_device()
    matrices = [jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)] * 4
    calls = h200.compile(jax.jit(products), h200.shapes(matrices, on)).custom_calls
    assert calls["__cublas$lt$matmul"] == 3
    heads = [jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)] * 4
    calls = h200.compile(jax.jit(partial(attend, "cudnn")), h200.shapes(heads, on)).custom_calls
    assert fused(calls) == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    values = jax.ShapeDtypeStruct((2, 256, 4, 128), jnp.float8_e4m3fn)
    in_fp8 = [Fp8Array(values, jax.ShapeDtypeStruct((), jnp.float32))] * 4
    calls = h200.compile(jax.jit(attend_in_fp8), h200.shapes(in_fp8, on)).custom_calls
    assert fused(calls) == ["__cudnn$fmhaSoftmaxBackwardF8", "__cudnn$fmhaSoftmaxF8"]
    assert attention_operations((2, 256, 4, 64)) == 7 * 2 * 2 * 4 * (256 * 256 / 2) * 64


def fused(calls) -> list[str]:
    """Those of attention."""
    return sorted(target for target in calls if "fmha" in target)

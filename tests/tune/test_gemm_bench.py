"""The bench of one GEMM: it multiplies what it should by the candidate it should, and a wrong product is far off.

Times need a device.
"""

import h200
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import assert_close
from reference import matmul as exact_product

from jax_fp8.kernels import extension
from jax_fp8.kernels.tuned_gemms import MAX_CANDIDATES, GemmProblem, ranks_in_use
from jax_fp8.train.cuda_graph import CUDA_GRAPH_OPTIONS
from jax_fp8.tune import gemm_bench
from jax_fp8.tune.gemm_bench import (
    B_SCALE,
    OFF_THE_LIST,
    GemmBench,
    OffTheList,
    Refused,
    count_copies_and_calls,
    distance,
    seconds_of,
)

REASON = h200.missing_reason() or extension.missing_reason()
compiled = pytest.mark.skipif(REASON is not None, reason=str(REASON))

KINDS = [  # a, b, result, bias, c, accumulation
    ("float8_e4m3fn", "float8_e4m3fn", "bfloat16", True, False, "fast"),
    ("float8_e5m2", "float8_e4m3fn", "bfloat16", False, False, "split"),
    ("float8_e4m3fn", "float8_e5m2", "float32", False, True, "split"),
    ("float8_e4m3fn", "float8_e5m2", "float16", True, True, "fast"),
]
BY_TILE = [("float8_e4m3fn", "float8_e4m3fn", "float32", False, True, scaling) for scaling in ("1d2d", "2d1d", "1d1d")]


def problem(kind, m=48, n=32, k=64) -> GemmProblem:
    return GemmProblem(m, n, k, *kind)


@pytest.mark.parametrize("kind", [*KINDS, *BY_TILE])
def test_the_product_of_the_bench_is_that_of_the_problem(kind):
    bench = GemmBench(problem(kind))
    a, b, *addends = bench._copies[0]
    assert (a.shape, b.shape) == ((48, 64), (32, 64)) and (a.dtype.name, b.dtype.name) == kind[:2]
    assert np.mean(np.asarray(a, np.float32) != 0) > 0.95  # nothing is timed on zeros
    expected = exact_product(a, b, 1, B_SCALE)
    for addend in addends:
        expected = expected + np.asarray(addend, np.float64)
    product = bench._product(3)
    assert product.dtype.name == kind[2] and len(addends) == kind[3] + kind[4]
    assert_close(product, expected, "gemm_fast" if kind[2] == "float32" else "gemm_bfloat16")
    assert bench.error(3) == 0  # the reference has one candidate


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_tolerated_and_a_wrong_product_is_not(kind):
    bench = GemmBench(problem(kind))
    first, tolerated = bench._first, bench._tolerated
    rounded = (first.astype(jnp.float32) * (1 + gemm_bench.ROUNDING[kind[2]] / 2)).astype(first.dtype)
    assert distance(rounded, first, tolerated) < 1
    wrong = {
        "zeros": jnp.zeros_like(first),
        "half": first / 2,
        "one element": first.at[5, 7].add(1),
        "another order": first[::-1],
    }
    for name, product in wrong.items():
        assert distance(product, first, tolerated) > 1, name
    assert not distance(first.at[5, 7].set(jnp.nan), first, tolerated) <= 1


@compiled
@pytest.mark.parametrize("kind", KINDS)
def test_the_timed_program_is_a_graph_of_gemms(kind, monkeypatch):
    monkeypatch.setattr(gemm_bench, "CALLS", 5)
    monkeypatch.setattr(gemm_bench, "MOST_COPIES", 2)
    bench = GemmBench(problem(kind))
    arguments = h200.shapes((bench._copies, bench._scales), h200.on_mesh(h200.mesh(data=1)))
    program = h200.compile(bench._many, *arguments, **CUDA_GRAPH_OPTIONS)
    assert program.custom_calls == {"jax_fp8_gemm": 5} and program.graphs == 1
    assert not program.copies and not program.outside_graphs, program.thunks


@pytest.mark.parametrize("kind", BY_TILE)
def test_a_problem_by_tile_is_timed_by_tile(kind, with_kernels):
    bench = GemmBench(problem(kind, k=256))
    with bench._using(9):
        text = bench._one.trace(bench._copies[0], bench._scales[0]).lower(lowering_platforms=("cuda",)).as_text()
    assert f'scaling = "{kind[-1]}"' in text and "candidate = 9 : i32" in text


def test_every_call_of_the_timed_program_stays(monkeypatch, with_kernels):
    """Each is a custom call of its own with the candidate; equal ones would be computed once."""
    monkeypatch.setattr(gemm_bench, "CALLS", 5)
    monkeypatch.setattr(gemm_bench, "MOST_COPIES", 2)
    bench = GemmBench(problem(KINDS[3]))
    with bench._using(9):
        jaxpr = jax.make_jaxpr(bench._many)(bench._copies, bench._scales)
        text = bench._many.trace(bench._copies, bench._scales).lower(lowering_platforms=("cuda",)).as_text()
    assert len(bench._copies) == 2 and text.count("candidate = 9 : i32") == 5
    assert len({id(var) for var in jaxpr.jaxpr.outvars}) == 5
    assert len({float(scale) for scale in bench._scales}) == 5
    assert "output_operand_alias" not in text  # c is there again in the next call


@pytest.mark.parametrize(
    ("shape", "copies", "calls"),
    [
        ((16384, 6144, 2048), 3, 20),  # 44 MiB a copy
        ((16, 16, 16), 64, 64),
        ((65536, 32768, 4096), 2, 2),  # results of 4 GiB a call: no more than needed
    ],
)
def test_copies_and_calls(shape, copies, calls):
    assert count_copies_and_calls(problem(KINDS[0], *shape)) == (copies, calls)


def test_a_time_is_the_median_of_samples():
    clock, ran = FakeClock([0.3, 0.1, 0.2, 9.0, 0.2]), []
    assert seconds_of(lambda: ran.append(clock.tick()), clock, samples=5, programs=4) == pytest.approx(0.2)
    assert len(ran) == 3 + 5 * 4  # a warm-up before


class FakeClock:
    """A program takes one time in each sample of four, and nothing while warming up."""

    def __init__(self, times):
        self.times, self.now, self.ran = times, 0.0, 0

    def __call__(self):
        return self.now

    def tick(self):
        self.ran += 1
        if self.ran > 3:
            self.now += self.times[(self.ran - 4) // 4]


def test_seconds_are_of_one_call(monkeypatch):
    times = iter(range(10**6))
    bench = GemmBench(problem(KINDS[0]), clock=lambda: float(next(times)))
    assert bench.seconds(1) == pytest.approx(1 / 10 / len(bench._scales))  # a second a sample of ten programs


def test_a_candidate_is_in_use_only_while_it_runs_and_its_failure_is_told_apart():
    bench = GemmBench(problem(KINDS[0]))
    with bench._using(4):
        assert ranks_in_use() == {problem(KINDS[0]): 4}
    assert not ranks_in_use()
    for sentence, error in (
        (f"{OFF_THE_LIST}: one of the 7 that cuBLASLt offers", OffTheList),
        (f"INTERNAL: no {OFF_THE_LIST}: here", Refused),
    ):
        with pytest.raises(error) as raised, bench._using(4):
            raise jax.errors.JaxRuntimeError(f"{sentence}\nat some line")
        assert type(raised.value) is error and str(raised.value) == sentence


@compiled
def test_the_kernels_own_error_of_a_rank_is_known():
    bench = GemmBench(problem(KINDS[0]))
    arguments = h200.shapes((bench._copies[0], bench._scales[0]), h200.on_one_device())
    with pytest.raises(OffTheList, match=f"got {MAX_CANDIDATES}"), bench._using(MAX_CANDIDATES):
        bench._one.lower(*arguments).compile()

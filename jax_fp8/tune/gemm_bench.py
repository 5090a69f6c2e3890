"""Measures one FP8 product on the device, by any of cuBLASLt's candidates: its time, and its distance from the product
of the first candidate.

The operands are random, as in training: zeros draw less power and run faster. Calls rotate through more copies of them
than the cache holds, and every call writes its own result. A program of many calls is one CUDA graph, so it times
nothing but GEMMs.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.fp8_array import Fp8Array, tiles_of
from jax_fp8.kernels.gemm import SCALINGS, matmul
from jax_fp8.kernels.tuned_gemms import GemmProblem, Ranks, using_ranks
from jax_fp8.train.cuda_graph import CUDA_GRAPH_OPTIONS

ROTATED_BYTES = 128 * 2**20  # of operands; the L2 cache of an H200 holds 50 MiB
LEAST_COPIES, MOST_COPIES = 2, 64
CALLS = 20  # of a program, unless the results would exceed:
RESULT_BYTES = 4 * 2**30
B_SCALE = 0.125  # keeps sums of random products within float16

# |d - exact| <= ACCUMULATION * sum|a||b| + ROUNDING * |numbers that are rounded to the result's dtype|. Tensor cores
# keep about 13 fraction bits of the largest partial sum; split accumulation loses less.
ACCUMULATION = {"fast": 2.0**-10, "split": 2.0**-12} | dict.fromkeys(("1d2d", "2d1d", "1d1d"), 2.0**-12)
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float32": 2.0**-22}

OFF_THE_LIST = "OUT_OF_RANGE"  # the code by which csrc/gemm.cc reports a rank at which there is no algorithm


class Refused(RuntimeError):
    """A candidate that does not run here."""


class OffTheList(Refused):
    """A rank beyond the candidates that cuBLASLt offers."""


class GemmBench:
    """The candidates of one product; `clock` counts seconds."""

    def __init__(self, problem: GemmProblem, clock: Callable[[], float] = time.perf_counter):
        self._problem, self._clock = problem, clock
        copies, calls = count_copies_and_calls(problem)
        self._copies = [_random_operands(problem, key) for key in jax.random.split(jax.random.key(0), copies)]
        # XLA would compute equal calls once; a scale of its own makes each call different.
        self._scales = [jnp.float32(1 + call / calls) for call in range(calls)]
        options = CUDA_GRAPH_OPTIONS if jax.default_backend() == "gpu" else {}
        self._one = jax.jit(partial(_multiply, problem))
        self._many = jax.jit(partial(_multiply_all, problem), compiler_options=options)

    def seconds(self, candidate: int) -> float:
        """The time of one call."""
        with self._using(candidate):
            return seconds_of(partial(self._many, self._copies, self._scales), self._clock) / len(self._scales)

    def error(self, candidate: int) -> float:
        """The largest distance of an element from the first candidate's, as a multiple of the tolerance: up to 1, both
        compute the same product.
        """
        return float(distance(self._product(candidate), self._first, self._tolerated))

    def _product(self, candidate: int) -> jax.Array:
        with self._using(candidate):
            # Fill the memory that the result may reuse with NaNs: an element that the candidate does not write is NaN.
            shape = (self._problem.m, self._problem.n)
            poison = [jnp.full(shape, jnp.nan, self._problem.dtype) for _ in range(2)]
            jax.block_until_ready(poison)
            del poison
            return jax.block_until_ready(self._one(self._copies[0], self._scales[0]))

    @cached_property
    def _first(self) -> jax.Array:
        return self._product(0)

    @cached_property
    def _tolerated(self) -> jax.Array:
        return jax.jit(partial(_tolerance, self._problem))(self._copies[0], self._scales[0], self._first)

    @contextmanager
    def _using(self, candidate: int) -> Iterator[None]:
        try:
            with using_ranks(Ranks({self._problem: candidate})):
                yield
        except jax.errors.JaxRuntimeError as error:
            sentence = str(error).splitlines()[0]
            raise (OffTheList if sentence.startswith(f"{OFF_THE_LIST}:") else Refused)(sentence) from error


def count_copies_and_calls(problem: GemmProblem) -> tuple[int, int]:
    """How many copies of the operands a program rotates through, and how many calls it makes."""
    result = problem.m * problem.n * jnp.dtype(problem.dtype).itemsize
    operands = problem.k * (problem.m + problem.n) + (result if problem.has_c else 0)
    copies = max(LEAST_COPIES, min(math.ceil(ROTATED_BYTES / operands), MOST_COPIES))
    calls = max(LEAST_COPIES, min(max(CALLS, copies), RESULT_BYTES // result))
    return min(copies, calls), calls


def seconds_of(
    program: Callable[[], object], clock: Callable[[], float], samples: int = 7, programs: int = 10
) -> float:
    """Median time of a program, dispatched several times in a row, so that the device does not wait for the host."""
    for _ in range(3):
        jax.block_until_ready(program())
    times = []
    for _ in range(samples):
        start = clock()
        for _ in range(programs - 1):
            program()
        jax.block_until_ready(program())
        times.append((clock() - start) / programs)
    return statistics.median(times)


@jax.jit
def distance(product: jax.Array, expected: jax.Array, tolerated: jax.Array) -> jax.Array:
    """The largest difference of two arrays as a multiple of the tolerance there; NaN if either has one."""
    return jnp.max(jnp.abs(product.astype(jnp.float32) - expected.astype(jnp.float32)) / tolerated)


def _multiply_all(
    problem: GemmProblem, copies: Sequence[Sequence[jax.Array]], scales: Sequence[jax.Array]
) -> list[jax.Array]:
    return [_multiply(problem, copies[call % len(copies)], scale) for call, scale in enumerate(scales)]


def _multiply(problem: GemmProblem, operands: Sequence[jax.Array], scale: jax.Array) -> jax.Array:
    a, b, *addends = operands
    return matmul(
        *_scaled(problem, a, b, scale),
        dtype=problem.dtype,
        bias=addends[0] if problem.has_bias else None,
        c=addends[-1] if problem.has_c else None,
        c_in_place=False,
        accumulation="fast" if problem.accumulation == "fast" else "split",
    )


def _scaled(problem: GemmProblem, a: jax.Array, b: jax.Array, scale: jax.Array) -> tuple[Fp8Array, Fp8Array]:
    """Both operands with scales: one for the tensor, or the same one for each tile of a problem with tiles."""
    by_name = {name: tiles for tiles, name in SCALINGS.items()}
    a_tile, b_tile = by_name.get(problem.accumulation, (None, None))
    return _with_scale(a, scale, a_tile), _with_scale(b, jnp.float32(B_SCALE), b_tile)


def _with_scale(values: jax.Array, scale: jax.Array, tile: tuple[int, int] | None) -> Fp8Array:
    return Fp8Array(values, scale if tile is None else jnp.broadcast_to(scale, tiles_of(values.shape, tile)), tile)


def _tolerance(problem: GemmProblem, operands: Sequence[jax.Array], scale: jax.Array, first: jax.Array) -> jax.Array:
    """How far two correct products may be apart, element by element: both may be off by the bound above."""
    a, b, *addends = operands
    a, b = Fp8Array(_absolute(a), scale), Fp8Array(_absolute(b), jnp.float32(B_SCALE))
    magnitude = matmul(a, b, dtype=jnp.float32, accumulation="split")
    # Some algorithms round the product before they add a bias or c.
    rounded = 2 * jnp.abs(first.astype(jnp.float32))
    for addend in addends:
        rounded += jnp.abs(addend.astype(jnp.float32))
    return 2 * (ACCUMULATION[problem.accumulation] * magnitude + ROUNDING[problem.dtype] * rounded)


def _random_operands(problem: GemmProblem, key: jax.Array) -> list[jax.Array]:
    """a, b, and the bias and c if the problem has them."""
    keys = jax.random.split(key, 4)
    operands = [
        _normal(keys[0], (problem.m, problem.k), problem.a),
        _normal(keys[1], (problem.n, problem.k), problem.b),
    ]
    if problem.has_bias:
        dtype = "bfloat16" if problem.dtype == "float32" else problem.dtype
        operands.append(_normal(keys[2], (problem.n,), dtype))
    if problem.has_c:
        operands.append(_normal(keys[3], (problem.m, problem.n), problem.dtype))
    return operands


@partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)


def _absolute(values: jax.Array) -> jax.Array:
    """|values| of FP8; the highest bit is the sign."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(values, jnp.uint8) & 0x7F, values.dtype)

"""Measure the rates of one GPU: products in FP8 and bfloat16 by their size, a copy, attention by its length.

    programs of many calls each ─clock→ seconds of a call ─operations or bytes of a call→ rates

Collectives are not measured, since they need several GPUs. Neither is the time between two kernels, which is fitted to
whole steps.
"""

import itertools
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp

from jax_fp8.core.formats import E4M3
from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.fp8_attention import GRADIENTS, attend_backward
from jax_fp8.kernels.fp8_attention import attend as attend_by_fp8
from jax_fp8.kernels.tuned_gemms import GemmProblem
from jax_fp8.ops.attention import attention
from jax_fp8.plan.rates import Curve
from jax_fp8.train.cuda_graph import CUDA_GRAPH_OPTIONS
from jax_fp8.tune.gemm_bench import MOST_COPIES, ROTATED_BYTES, GemmBench, seconds_of

SIZES = (2048, 4096, 8192)  # of square products
COPIED_BYTES = 2**30  # much larger than the cache
OF_A_COPY = 0.9  # the share of a copy's rate that kernels with little computation reach in a step
SEQUENCES = ((8, 2048, 16, 128), (2, 8192, 16, 128))  # batch, seq, heads, head_dim

Clock = Callable[[], float]
Heads = tuple[int, int, int, int]  # batch, seq, heads, head_dim
Operands = TypeVar("Operands")


def measure_rates(
    clock: Clock = time.perf_counter,
    sizes: tuple[int, ...] = SIZES,
    copied: int = COPIED_BYTES,
    sequences: tuple[Heads, ...] = SEQUENCES,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Curve | float]:
    """The measured rates, by the names of the fields of `Rates`. The GPU must have no other work.

    Args:
      clock: returns seconds.
      sizes: m, n and k of the square products, ascending.
      copied: bytes of the array that is copied.
      sequences: shapes of queries, keys and values, ascending by tokens.
      report: gets a line for each rate, as soon as it is measured.
    """
    measures: dict[str, Callable[[], Curve | float]] = {
        "fp8": lambda: _curve(sizes, lambda size: fp8_seconds(size, "fast", clock)),
        "fp8_split": lambda: _curve(sizes, lambda size: fp8_seconds(size, "split", clock)),
        "bf16": lambda: _curve(sizes, lambda size: bf16_seconds(size, clock)),
        "attention": lambda: _attention_curve(sequences, lambda shape: attention_seconds(shape, clock)),
        "attention_fp8": lambda: _attention_curve(sequences, lambda shape: fp8_attention_seconds(shape, clock)),
        "memory": lambda: OF_A_COPY * 2 * copied / copy_seconds(copied, clock),
    }
    rates: dict[str, Curve | float] = {}
    for name, measure in measures.items():
        rates[name] = measure()
        report(f"{name:<15}{_describe(name, rates[name])}")
    return rates


def fp8_seconds(size: int, accumulation: str, clock: Clock) -> float:
    """Seconds of a square product of random E4M3 values."""
    e4m3 = "float8_e4m3fn"
    problem = GemmProblem(size, size, size, e4m3, e4m3, "bfloat16", False, False, accumulation)
    return GemmBench(problem, clock).seconds(0)


def bf16_seconds(size: int, clock: Clock) -> float:
    """Seconds of a square product in bfloat16. Its program has many, whose operands exceed the cache."""
    count = max(2, min(ROTATED_BYTES // (2 * size * size), MOST_COPIES))
    operands = [_random(key, (size, size)) for key in jax.random.split(jax.random.key(0), count + 1)]
    return _seconds(products, operands, clock) / count


def products(operands: list[jax.Array]) -> list[jax.Array]:
    """The product of each operand with the next one."""
    return [a @ b for a, b in itertools.pairwise(operands)]


def copy_seconds(copied: int, clock: Clock) -> float:
    """Seconds to read and to write so many bytes, in words of 4 bytes: XLA copies smaller words more slowly."""
    return _seconds(partial(jnp.bitwise_xor, jnp.uint32(1)), jnp.ones(copied // 4, jnp.uint32), clock)


def attention_seconds(shape: Heads, clock: Clock) -> float:
    """Seconds of causal attention in bfloat16, forward and backward."""
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    operands = [_random(key, shape) for key in jax.random.split(jax.random.key(0), 4)]
    return _seconds(partial(attend, implementation), operands, clock)


def attend(implementation: str, operands: list[jax.Array]) -> tuple[jax.Array, ...]:
    """The output of attention for query, key and value, and their gradients; the last operand is that of the output."""
    *inputs, gradient = operands
    attended, backward = jax.vjp(partial(attention, causal=True, implementation=implementation), *inputs)
    return attended, *backward(gradient)


def fp8_attention_seconds(shape: Heads, clock: Clock) -> float:
    """Seconds of causal attention in FP8, forward and backward, without the casts of its operands."""
    keys = jax.random.split(jax.random.key(0), 4)
    operands = [Fp8Array(_random(key, shape).astype(E4M3), jnp.float32(1)) for key in keys]
    return _seconds(attend_in_fp8, operands, clock)


def attend_in_fp8(operands: list[Fp8Array]) -> tuple[PyTree, ...]:
    """The output of attention in FP8 for query, key and value, and their gradients; see `attend`."""
    query, key, value, gradient = operands
    attended, statistics = attend_by_fp8(query, key, value, causal=True)
    scales = (jnp.float32(1),) * len(GRADIENTS)
    return attended, *attend_backward(query, key, value, attended, statistics, gradient, scales, causal=True)


def attention_operations(shape: Heads) -> float:
    """Operations of two products forward and five backward; causal attention needs half of all pairs of tokens."""
    batch, seq, heads, dim = shape
    return (2 + 5) * 2 * batch * heads * seq * seq * dim / 2


def _curve(sizes: Iterable[int], seconds: Callable[[int], float]) -> Curve:
    return tuple((float(2 * size**3), 2 * size**3 / seconds(size)) for size in sizes)


def _attention_curve(shapes: Iterable[Heads], seconds: Callable[[Heads], float]) -> Curve:
    return tuple((float(shape[1]), attention_operations(shape) / seconds(shape)) for shape in shapes)


def _seconds(program: Callable[[Operands], PyTree], operands: Operands, clock: Clock) -> float:
    options = CUDA_GRAPH_OPTIONS if jax.default_backend() == "gpu" else {}
    return seconds_of(partial(jax.jit(program, compiler_options=options), operands), clock)


@partial(jax.jit, static_argnums=1)
def _random(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16)


def _describe(name: str, rate: Curve | float) -> str:
    if isinstance(rate, tuple):
        unit = "tokens" if name.startswith("attention") else "operations"
        return ", ".join(f"{value / 1e12:.0f} TFLOP/s ({size:.1e} {unit})" for size, value in rate)
    return f"{rate / 1e12:.2f} T/s"

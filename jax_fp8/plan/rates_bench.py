"""The rates that one GPU can be asked for: products in FP8 and bfloat16 by their size, a copy, attention.

    programs of many calls each ─clock→ seconds of a call ─operations or bytes of a call→ rates

Collectives need several GPUs, and what lies between two kernels is fitted to whole steps: these are not measured.
"""

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_fp8.core.formats import E4M3
from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.kernels.fp8_attention import GRADIENTS, attend_backward
from jax_fp8.kernels.fp8_attention import attend as attend_by_fp8
from jax_fp8.kernels.tuned_gemms import GemmProblem
from jax_fp8.ops.attention import attention
from jax_fp8.plan.rates import Curve
from jax_fp8.train.cuda_graph import CUDA_GRAPH_OPTIONS
from jax_fp8.tune.gemm_bench import MOST_COPIES, ROTATED_BYTES, GemmBench, seconds_of

SIZES = (2048, 4096, 8192)  # of square products
COPIED_BYTES = 2**30  # far beyond the cache
OF_A_COPY = 0.9  # what kernels reach in a step that read, compute a little and write
SEQUENCES = ((8, 2048, 16, 128), (2, 8192, 16, 128))  # batch, seq, heads, head_dim

Clock = Callable[[], float]
Heads = tuple[int, int, int, int]


def measure_rates(
    clock: Clock = time.perf_counter,
    sizes: tuple[int, ...] = SIZES,
    copied: int = COPIED_BYTES,
    sequences: tuple[Heads, ...] = SEQUENCES,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Rates by the names of `Rates`. Keep the GPU otherwise idle.

    Args:
      clock: counts seconds.
      sizes: m, n and k of products, rising.
      copied: bytes of the array that is copied.
      sequences: shapes of queries, keys and values, by their tokens.
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
    found: dict[str, Any] = {}
    for name, measure in measures.items():
        found[name] = measure()
        report(f"{name:<15}{_describe(name, found[name])}")
    return found


def fp8_seconds(size: int, accumulation: str, clock: Clock) -> float:
    """Of a square product of random E4M3."""
    e4m3 = "float8_e4m3fn"
    problem = GemmProblem(size, size, size, e4m3, e4m3, "bfloat16", False, False, accumulation)
    return GemmBench(problem, clock).seconds(0)


def bf16_seconds(size: int, clock: Clock) -> float:
    """Of a square product, among as many as keep their operands out of the cache."""
    count = max(2, min(ROTATED_BYTES // (2 * size * size), MOST_COPIES))
    operands = [_random(key, (size, size)) for key in jax.random.split(jax.random.key(0), count + 1)]
    return _seconds(products, operands, clock) / count


def products(operands: list[jax.Array]) -> list[jax.Array]:
    """Of each with the next."""
    return [a @ b for a, b in itertools.pairwise(operands)]


def copy_seconds(copied: int, clock: Clock) -> float:
    """Of reading and writing so many bytes each, in words of 4: XLA moves smaller ones more slowly."""
    return _seconds(partial(jnp.bitwise_xor, jnp.uint32(1)), jnp.ones(copied // 4, jnp.uint32), clock)


def attention_seconds(sequences: Heads, clock: Clock) -> float:
    """Of causal attention, forward and backward."""
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    operands = [_random(key, sequences) for key in jax.random.split(jax.random.key(0), 4)]
    return _seconds(partial(attend, implementation), operands, clock)


def attend(implementation: str, operands: list[jax.Array]) -> tuple[jax.Array, ...]:
    """The result of attention to queries, keys and values, and their gradients for that of the result."""
    *inputs, gradient = operands
    attended, backward = jax.vjp(partial(attention, causal=True, implementation=implementation), *inputs)
    return attended, *backward(gradient)


def fp8_attention_seconds(sequences: Heads, clock: Clock) -> float:
    """The same in FP8, of values that are cast already."""
    keys = jax.random.split(jax.random.key(0), 4)
    operands = [Fp8Array(_random(key, sequences).astype(E4M3), jnp.float32(1)) for key in keys]
    return _seconds(attend_in_fp8, operands, clock)


def attend_in_fp8(operands: list[Fp8Array]) -> tuple[Any, ...]:
    """The result of attention in FP8, and its gradients."""
    query, key, value, gradient = operands
    attended, statistics = attend_by_fp8(query, key, value, causal=True)
    scales = (jnp.float32(1),) * len(GRADIENTS)
    return attended, *attend_backward(query, key, value, attended, statistics, gradient, scales, causal=True)


def attention_operations(sequences: Heads) -> float:
    """Of two products forward and five backward; half of all pairs count."""
    batch, seq, heads, dim = sequences
    return (2 + 5) * 2 * batch * heads * seq * seq * dim / 2


def _curve(sizes, seconds) -> Curve:
    return tuple((float(2 * size**3), 2 * size**3 / seconds(size)) for size in sizes)


def _attention_curve(sequences, seconds) -> Curve:
    return tuple((float(shape[1]), attention_operations(shape) / seconds(shape)) for shape in sequences)


def _seconds(program, operands, clock) -> float:
    options = CUDA_GRAPH_OPTIONS if jax.default_backend() == "gpu" else {}
    return seconds_of(partial(jax.jit(program, compiler_options=options), operands), clock)


@partial(jax.jit, static_argnums=1)
def _random(key, shape):
    return jax.random.normal(key, shape, jnp.bfloat16)


def _describe(name: str, rate: Curve | float) -> str:
    if isinstance(rate, tuple):
        of = "tokens" if name.startswith("attention") else "operations"
        return ", ".join(f"{value / 1e12:.0f} TFLOP/s ({size:.1e} {of})" for size, value in rate)
    return f"{rate / 1e12:.2f} T/s"

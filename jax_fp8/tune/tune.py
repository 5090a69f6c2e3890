"""Measures cuBLASLt's candidates for every FP8 GEMM of a program on the device, and keeps the fastest.

A candidate replaces the heuristic's first choice only if it computes the same product and is faster by more than one
percent. For that, both are measured twice, the first choice before and after the candidates; the slower time of the
candidate is compared with the faster time of the first choice. Clocks drift, and the smallest of many noisy times is
too small.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import jax
from jax.extend.core import JaxprEqn
from jax.sharding import AxisType

from jax_fp8.core.types import PyTree
from jax_fp8.inspect.explain import is_fp8_gemm, products, traced
from jax_fp8.inspect.written_collectives import shaped
from jax_fp8.kernels.tuned_gemms import MAX_CANDIDATES, GemmProblem
from jax_fp8.tune.gemm_bench import GemmBench, OffTheList, Refused
from jax_fp8.tune.gemm_table import Choice, GemmTable, default_path, this_gpu

SMALLEST_GAIN = 0.01


class Bench(Protocol):
    """Measurements of the candidates of one product; see `GemmBench`."""

    def seconds(self, candidate: int) -> float: ...

    def error(self, candidate: int) -> float: ...


def tune(
    fn: Callable,
    *args: PyTree,
    path: str | Path | None = None,
    again: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> GemmTable:
    """Time the candidates of every FP8 GEMM of `fn(*args)` on this GPU, and keep the fastest; seconds for each GEMM.

    GEMMs in the file are not measured again; a new measurement is written at once. Keep the GPU otherwise idle, and
    tune in one process.

    Args:
      fn: a function, such as a training step; it is traced and not run.
      *args: arrays, or a `jax.ShapeDtypeStruct` in place of any. On a mesh with Auto axes, a trace does not know the
        shapes on one device: then tune the step of one device, with its share of the batch.
      path: of the table; None is this machine's own, in the user's cache folder.
      again: measure everything anew, as after a new driver.
      report: gets a line for every GEMM, as soon as it is measured.

    Returns:
      The table for `tuned_gemms`.

    Raises:
      ValueError: if there is no GPU or no cuBLASLt, `fn` has no FP8 GEMM, or the file is not a table of this machine.

    Example:
      The last line needs a GPU.

      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> layer, x = fp8.Dense(32), jnp.ones((16, 16))
      >>> variables = layer.init(jax.random.key(0), x)
      >>> table = fp8.tune(layer.apply, variables, x)  # doctest: +SKIP
    """
    here = GemmTable(*this_gpu())
    problems = list_fp8_gemms(fn, *args)
    if not problems:
        raise ValueError("tune needs a function with FP8 matrix products, got one without; fp8.explain says why")
    # The function may be traced for a mesh, but each problem is that of one device.
    one = jax.make_mesh((1,), ("one",), axis_types=(AxisType.Auto,), devices=jax.local_devices()[:1])

    def measure(problem: GemmProblem) -> Choice:
        with jax.set_mesh(one):
            return choose(GemmBench(problem))

    return tune_problems(problems, here, path, measure, again, report)


def list_fp8_gemms(fn: Callable, *args: PyTree) -> list[GemmProblem]:
    """The different FP8 GEMMs of a function as it would run on CUDA, in program order."""
    equations = (equation for equation, _, _ in products(traced(fn, *args)))
    return list(dict.fromkeys(_problem(equation) for equation in equations if is_fp8_gemm(equation)))


def tune_problems(
    problems: list[GemmProblem],
    here: GemmTable,
    path: str | Path | None,
    measure: Callable[[GemmProblem], Choice],
    again: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> GemmTable:
    """The table of this machine with a choice for every problem; those that are not in the file are measured. `here` is
    an empty table, which names the machine.
    """
    path = Path(path) if path is not None else default_path(here.device, here.cublaslt)
    table = here.updated(GemmTable.load(path)) if path.exists() else here
    for problem in problems:
        if again or not table.restricted_to([problem]).choices:
            measured = GemmTable(here.device, here.cublaslt, ((problem, measure(problem)),))
            measured.save(path)
            table = table.updated(measured)
        report(table.restricted_to([problem]).rows()[0])
    return table


def choose(bench: Bench) -> Choice:
    """The fastest candidate of one product, or rank 0."""
    first, times, skipped = bench.seconds(0), {}, []
    for candidate in range(1, MAX_CANDIDATES):
        try:
            error = bench.error(candidate)
            if error <= 1:
                times[candidate] = bench.seconds(candidate)
            else:  # also where it is NaN
                skipped.append(f"rank {candidate} differs by {error:.3g} times what rounding explains")
        except OffTheList:
            break
        except Refused as refusal:
            skipped.append(f"rank {candidate}: {refusal}")
    fastest = min(times, key=lambda candidate: times[candidate], default=0)
    # Measure both again, and be careful: the slower time of the candidate, the faster one of the first choice.
    best = max(times[fastest], bench.seconds(fastest)) if fastest else first
    first = min(first, bench.seconds(0))
    if best > first * (1 - SMALLEST_GAIN):
        fastest, best = 0, first
    return Choice(fastest, first * 1e6, best * 1e6, tuple(skipped))


def _problem(equation: JaxprEqn) -> GemmProblem:
    """The product that a custom call asks of cuBLASLt."""
    (a, b), d = map(shaped, equation.invars[:2]), shaped(equation.outvars[0])
    attributes = dict(equation.params["attributes"])
    return GemmProblem(
        m=a.shape[0],
        n=d.shape[1],  # b may have rows for more columns
        k=a.shape[1],
        a=a.dtype.name,
        b=b.dtype.name,
        dtype=d.dtype.name,
        has_bias=bool(attributes["has_bias"]),
        has_c=bool(attributes["has_c"]),
        accumulation=attributes["scaling"] or ("fast" if attributes["fast_accumulation"] else "split"),
    )

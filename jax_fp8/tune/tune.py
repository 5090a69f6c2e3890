"""Measure cuBLASLt's candidates for every FP8 GEMM of a program on the device, and remember the fastest.

A candidate replaces the heuristic's first choice only if it computes the same product and is faster by more than one
percent, twice, than the first choice was before and after:
clocks drift, and of sixteen noisy times the smallest is too small.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
from jax.sharding import AxisType

from jax_fp8.inspect.explain import is_fp8_gemm, products, traced
from jax_fp8.kernels.tuned_gemms import MAX_CANDIDATES, GemmProblem
from jax_fp8.tune.gemm_bench import GemmBench, OffTheList, Refused
from jax_fp8.tune.gemm_table import Choice, GemmTable, default_path, this_gpu

SMALLEST_GAIN = 0.01


class Bench(Protocol):
    """What can be asked about the candidates of one product; see `GemmBench`."""

    def seconds(self, candidate: int) -> float: ...

    def error(self, candidate: int) -> float: ...


def tune(
    fn: Callable,
    *args: Any,
    path: str | Path | None = None,
    again: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> GemmTable:
    """Time the candidates of every FP8 GEMM of `fn(*args)` on this GPU, seconds for each,
    and return the table for `tuned_gemms`.

    What the file knows is not measured again; what is measured is written at once.
    Keep the GPU otherwise idle, and tune in one process.

    Args:
      fn: a function, such as a training step; it is traced and not run.
      *args: arrays or `jax.ShapeDtypeStruct`s. Where the mesh has Auto axes, a trace does not know the shapes of one
        device: tune the step of one, with its share of the batch.
      path: of the table; None is this machine's own, in the user's cache folder.
      again: measure everything anew, as after a new driver.
      report: gets a line for every GEMM, as soon as it is measured.
    """
    here = GemmTable(*this_gpu())
    problems = list_fp8_gemms(fn, *args)
    if not problems:
        raise ValueError("tune needs a function with FP8 matrix products, got one without; fp8.explain says why")
    # Whatever mesh the function is traced for, each problem is that of one device.
    one = jax.make_mesh((1,), ("one",), axis_types=(AxisType.Auto,), devices=jax.local_devices()[:1])

    def measure(problem):
        with jax.set_mesh(one):
            return choose(GemmBench(problem))

    return tune_problems(problems, here, path, measure, again, report)


def list_fp8_gemms(fn: Callable, *args: Any) -> list[GemmProblem]:
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
    """The table of this machine, an empty one given, with a choice for every problem;
    what the file lacks is measured.
    """
    path = Path(path) if path is not None else default_path(here.device, here.cublaslt)
    table = here.updated(GemmTable.load(path)) if path.exists() else here
    for problem in problems:
        if again or not table.of([problem]).choices:
            measured = GemmTable(here.device, here.cublaslt, ((problem, measure(problem)),))
            measured.save(path)
            table = table.updated(measured)
        report(table.of([problem]).rows()[0])
    return table


def choose(bench: Bench) -> Choice:
    """The fastest candidate of one product, or rank 0."""
    first, times, skipped = bench.seconds(0), {}, []
    for candidate in range(1, MAX_CANDIDATES):
        try:
            error = bench.error(candidate)
            if error <= 1:
                times[candidate] = bench.seconds(candidate)
            else:  # also NaN
                skipped.append(f"rank {candidate} differs by {error:.3g} times what rounding explains")
        except OffTheList:
            break
        except Refused as refusal:
            skipped.append(f"rank {candidate}: {refusal}")
    fastest = min(times, key=lambda candidate: times[candidate], default=0)
    best = max(times[fastest], bench.seconds(fastest)) if fastest else first
    first = min(first, bench.seconds(0))
    if best > first * (1 - SMALLEST_GAIN):
        fastest, best = 0, first
    return Choice(fastest, first * 1e6, best * 1e6, tuple(skipped))


def _problem(equation) -> GemmProblem:
    """What a custom call asks of cuBLASLt."""
    (a, b), d = (var.aval for var in equation.invars[:2]), equation.outvars[0].aval
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

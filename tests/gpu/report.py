"""The shared part of the checks on a GPU: the report of all comparisons, and the command line.

A check is a function that takes a report. A script has a list of checks, perhaps some functions that time kernels, and
a `main`:

    def main(arguments: list[str] | None = None) -> int:
        script = Script(__file__, __doc__, CHECKS, [time_norms], target="jax_fp8_norm_backward", self_test=True)
        return run_script(script, arguments)

It prints one line per timing and per group of checks, writes the same as JSON, and exits with 1 when anything is wrong.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.kernels import extension


class Report:
    """Counts comparisons; collects failures, timings and the largest error of each kind."""

    def __init__(self):
        self.passed, self.failures, self.worst, self.timings = defaultdict(int), [], {}, []

    def expect(self, group: str, holds: bool, what: str):
        if holds:
            self.passed[group] += 1
        else:
            self.failures.append(f"{group}: {what}")
            print("FAILED", self.failures[-1], flush=True)

    def bits(self, group: str, got, wanted, what: str):
        got, wanted = as_bytes(got), as_bytes(wanted)
        if got.shape != wanted.shape:
            self.expect(group, False, f"{what}: {got.size} bytes instead of {wanted.size}")
            return
        wrong = np.flatnonzero(got != wanted)
        first = f", byte {wrong[0]} is {got[wrong[0]]} instead of {wanted[wrong[0]]}" if wrong.size else ""
        self.expect(group, not wrong.size, f"{what}: {wrong.size} of {wanted.size} bytes differ{first}")

    def show(self):
        for row in self.timings:
            figures = (f"{value:9.2f} {key}" for key, value in row.items() if key not in ("what", "shape"))
            print(f"{row['what']:44} {row.get('shape', ''):24} {'  '.join(figures)}")
        for kind, error in self.worst.items():
            print(f"worst {error:.1e} {kind}")
        for group, count in self.passed.items():
            print(f"ok {count:6} {group}")
        for failure in self.failures[:20]:
            print("FAILED", failure)
        print(f"{len(self.failures)} failures")


def as_bytes(array) -> np.ndarray:
    """The bytes of an array; in float32 all NaNs become the same."""
    array = np.asarray(array)
    if array.dtype == np.float32:
        array = np.where(np.isnan(array), np.float32(np.nan), array)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def on_gpu() -> bool:
    return next(iter(jnp.zeros(()).devices())).platform == "gpu"


@dataclass(frozen=True)
class Script:
    """The checks and timings of a script.

    Args:
      file, doc: `__file__` and `__doc__` of the script.
      checks, timings: called with the report, in this order. A self-test skips the timings.
      target: the custom call that the checks need on a GPU.
      self_test: whether the checks also run on a CPU, where the reference takes the place of the kernels.
      anywhere: whether the checks need neither a GPU nor the kernels.
    """

    file: str
    doc: str
    checks: Sequence[Callable[[Report], None]]
    timings: Sequence[Callable[[Report], None]] = ()
    target: str = "jax_fp8_quantize"
    self_test: bool = False
    anywhere: bool = False


def run_script(script: Script, arguments: list[str] | None = None) -> int:
    """The `main` of a script. Returns 0, or 1 if a check failed, or 2 if the script cannot run here."""
    options = _options(script, arguments)
    has_kernels = on_gpu() and script.target in extension.TARGETS
    if not (options.self_test or script.anywhere or has_kernels):
        reason = extension.missing_reason() or "rebuild them"
        print(f"{Path(script.file).stem} needs a GPU and the kernels, got {jax.devices()}; {reason}")
        return 2
    about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "build": extension.build_info()}
    print(*about.values(), flush=True)
    checks = [] if options.only_timing else script.checks
    timings = [] if options.skip_timing or options.self_test else script.timings
    report, seconds = Report(), {}
    for step in (*checks, *timings):
        if options.only and step.__name__ not in options.only:
            continue
        start = time.perf_counter()
        step(report)
        seconds[step.__name__] = time.perf_counter() - start
        print(f"{step.__name__}: {seconds[step.__name__]:.1f} s, {len(report.failures)} failures so far", flush=True)
    report.show()
    if options.output:
        result = about | {"seconds": seconds} | vars(report)
        options.output.write_text(json.dumps(result, indent=1))
    return 1 if report.failures else 0


def _options(script, arguments):
    names = [step.__name__ for step in (*script.checks, *script.timings)]
    parser = argparse.ArgumentParser(description=script.doc.splitlines()[0])
    parser.add_argument("--output", type=Path, help="where to write the results as JSON")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help="these checks and timings alone")
    which = parser.add_mutually_exclusive_group()
    parser.set_defaults(self_test=False, skip_timing=False, only_timing=False)
    if script.timings:
        which.add_argument("--skip-timing", action="store_true", help="check only")
        which.add_argument("--only-timing", action="store_true", help="time only")
    if script.self_test:
        which.add_argument("--self-test", action="store_true", help="on a CPU: the references, and small arrays")
    return parser.parse_args(arguments)

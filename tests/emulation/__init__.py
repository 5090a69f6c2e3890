"""Runs the CUDA kernels of csrc on a CPU. A C++ compiler compiles the same text, and every thread is a fiber.

A test names a source, writes a few lines of C++ that call its launch function, and calls these with NumPy arrays:

    ENTRY = '''
    extern "C" int amax(const void* x, int64_t x_type, int64_t count, float* amax) {
      return jax_fp8::launch_amax({x, static_cast<jax_fp8::SourceType>(x_type), count, amax}, nullptr);
    }
    '''
    kernels = compile_for_cpu("amax.cu", ENTRY)
    (amax,) = kernels.call("amax", x, 1, x.size, Result((), np.float32))

The parameters of an entry are pointers, int64_t and double, and it returns a cudaError_t. A plain array is an input,
which the kernel must not write. The kernel fills a `Result(shape, dtype)` and changes an `InPlace(array)`; `call`
returns these in order. A tuple or list of arrays is an array of pointers, and `None` a null pointer. Kernels run in a
process of their own (`execution.py`).

Every call runs three times. Each run has another order of threads and blocks, and fills memory with another poison
byte before. The results must be the same bits. So a test finds a missing barrier, or a byte that no thread wrote. Sums
of floats by `atomicAdd` depend on the order: pass one of ORDERS at a time, and compare with a tolerance.

Other mistakes raise an EmulationError with the thread and mostly the line:

  - a barrier or warp operation that not all threads reach
  - a vector access at an address that is not aligned
  - an access outside an array, or an index outside a C++ array
  - a write outside shared memory, or an access to that of a block that has not started or has exited
  - a launch beyond the device's limits
  - an access to an array that is `Late` by a thread that has not waited for the kernel before

The emulation does not find races that none of the orders shows, wrong memory orders, bank conflicts or slow code. The
blocks of one cluster run together. A kernel in which a block waits for a block of another cluster never ends.
Asynchronous work (tensor copies, words sent to another block, products of a warpgroup) happens at once or as late as
possible. The emulation does not notice if the fence before it is missing.

Single operations have the device's results, with three exceptions. nvcc fuses `a * b + c` into one rounding unless
intrinsics keep the two apart, and this compiler does not. expf and similar functions are the host's. NaNs have the
device's bits only after intrinsics and conversions.
"""

import functools
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from emulation.compiler import CSRC, CompilerError, build, gcc
from emulation.execution import EmulationError, call_elsewhere
from emulation.memory import InPlace, Input, Late, Result

__all__ = [
    "ONLY_BFLOAT16",
    "ORDERS",
    "CompilerError",
    "EmulationError",
    "InPlace",
    "Input",
    "Late",
    "Result",
    "compile_for_cpu",
    "planted",
]

# The orders of threads and blocks: first to last, last to first, and random with this seed; each with the poison byte.
ORDERS = {"forward": (0, 0xA5), "backward": (1, 0x5A), "random": (7, 0xFF)}

# Changes that remove the kernels for float32 and float16, so that a planted mistake compiles sooner.
ONLY_BFLOAT16 = tuple(("device/by_dtype.cuh", f"launch({other}{{}});", ";") for other in ("float", "Float16"))


def planted(mistakes: dict[str, tuple]) -> list:
    """The names of mistakes to parametrise over. The first one is for every run, and the others are marked `slow`. A
    mistake whose text is no longer in the source runs always, so that every run reports it.

    Args:
      mistakes: by name the change for `compile_for_cpu`, alone or followed by the message that the test expects.
    """
    changes = {name: mistake if isinstance(mistake[0], str) else mistake[0] for name, mistake in mistakes.items()}
    first = next(iter(changes))
    return [
        pytest.param(name, marks=pytest.mark.slow if name != first and text in (CSRC / file).read_text() else [])
        for name, (file, text, *_) in changes.items()
    ]


@functools.cache
def compile_for_cpu(source: str, entries: str, changes: tuple[tuple[str, str, str], ...] = ()) -> "Kernels":
    """Compiles one source and its entries; skips the test where there is no C++ compiler.

    Args:
      source: a file of csrc, or the text of a source.
      entries: the functions to call, as C++.
      changes: (file of csrc, text, replacement): mistakes planted before compiling, which a test must notice.
    """
    if gcc() is None:
        pytest.skip("needs GCC 11 or newer: g++ on the path, or CXX")
    return Kernels(build(source, entries, changes))


@dataclass(frozen=True)
class Kernels:
    """A compiled source."""

    library: pathlib.Path

    def call(self, entry: str, *arguments, orders: Sequence[str] = tuple(ORDERS)) -> list[np.ndarray]:
        """Runs an entry in every order; returns its results and the arrays it changed in place."""
        first, *others = call_elsewhere(self.library, entry, arguments, [ORDERS[order] for order in orders])
        for order, other in zip(orders[1:], others, strict=True):
            for number, (array, again) in enumerate(zip(first, other, strict=True)):
                if array.tobytes() != again.tobytes():
                    raise EmulationError(
                        f"{entry}: result {number} must not depend on the order of threads nor on what memory held, "
                        f"got {_differing(array, again)} bytes that differ between {orders[0]} and {order}"
                    )
        return first


def _differing(array, again):
    return int(np.sum(np.frombuffer(array.tobytes(), np.uint8) != np.frombuffer(again.tobytes(), np.uint8)))

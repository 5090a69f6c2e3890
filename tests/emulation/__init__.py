"""The CUDA kernels of csrc on a CPU: the same text, compiled by a C++ compiler, every thread a fiber.

A test names a source, writes the few lines of C++ that call its launch function, and calls them with NumPy arrays:

    ENTRY = '''
    extern "C" int amax(const void* x, int64_t x_type, int64_t count, float* amax) {
      return jax_fp8::launch_amax({x, static_cast<jax_fp8::SourceType>(x_type), count, amax}, nullptr);
    }
    '''
    kernels = compile_for_cpu("amax.cu", ENTRY)
    (amax,) = kernels.call("amax", x, 1, x.size, Result((), np.float32))

The parameters of an entry are pointers, int64_t and double; it returns a cudaError_t. A plain array is an input, which
must not be written. `Result(shape, dtype)` is an array to be filled, `InPlace(array)` one to be changed; `call` returns
these in order. A tuple or list of such is an array of pointers, `None` a null pointer.
Kernels run in a process of their own (`execution.py`).

Every call runs three times, with the threads and blocks in another order and over another poison, and the results must
be the same bits. So a missing barrier shows, and so does a byte that was not written. Sums of floats by `atomicAdd`
depend on the order: give one of ORDERS at a time, and compare with a tolerance.

What else is found, as an EmulationError with the thread and mostly the line: a barrier or warp operation that not all
reach, a vector at an address that is not aligned, an access outside an array, an index outside a C++ array, a write
outside shared memory, the shared memory of a block that has not begun or has ended, a launch beyond the device's
limits. What is not: races that none of the orders shows, memory order, bank conflicts and speed. The blocks of a
cluster run together; a kernel in which one waits for a block of another cluster never ends.
Copies of boxes, words that are sent to another block and products of a warpgroup are made at once, or as late as can
be; a fence that publishes what they read may be missing.

Numbers are the device's as far as single operations go. But nvcc joins a product and a sum that no intrinsic keeps
apart (`a * b + c`) into one rounding, and this compiler does not; expf and its kin are the host's; NaNs are the
device's only after intrinsics and conversions.
"""

import functools
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from emulation.compiler import CSRC, CompilerError, build, gcc
from emulation.execution import EmulationError, call_elsewhere
from emulation.memory import InPlace, Input, Result

__all__ = [
    "ONLY_BFLOAT16",
    "ORDERS",
    "CompilerError",
    "EmulationError",
    "InPlace",
    "Input",
    "Result",
    "compile_for_cpu",
    "planted",
]

# Threads and blocks first to last, last to first, and as a seed has it; each with the byte that memory starts as.
ORDERS = {"forward": (0, 0xA5), "backward": (1, 0x5A), "random": (7, 0xFF)}

# Changes that leave kernels for bfloat16 only: a mistake is compiled sooner without the others.
ONLY_BFLOAT16 = tuple(("device/by_dtype.cuh", f"launch({other}{{}});", ";") for other in ("float", "Float16"))


def planted(mistakes: dict[str, tuple]) -> list:
    """The names of mistakes to parametrise over: the first one is for every run, the others are marked `slow`, unless
    what one is to change is no longer there, which every run must say.

    Args:
      mistakes: by name what `compile_for_cpu` is to change, alone or followed by what the test must then say.
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
      changes: (file of csrc, text, other text) to be replaced before: mistakes that a test must notice.
    """
    if gcc() is None:
        pytest.skip("needs GCC 11 or newer: g++ on the path, or CXX")
    return Kernels(build(source, entries, changes))


@dataclass(frozen=True)
class Kernels:
    """A compiled source."""

    library: pathlib.Path

    def call(self, entry: str, *arguments, orders: Sequence[str] = tuple(ORDERS)) -> list[np.ndarray]:
        """Runs an entry in every order; returns its results and what it changed in place."""
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

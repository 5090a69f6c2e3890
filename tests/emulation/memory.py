"""Arrays for kernels, each between pages of memory that a kernel must not touch."""

import ctypes
import mmap
from dataclasses import dataclass

import numpy as np

GUARD = 2**20  # bytes; a mistake may miss by whole rows, which a guard of one page would not catch
C_LIBRARY = ctypes.CDLL(None)


@dataclass(frozen=True)
class Input:
    """An array that a kernel reads, at `offset` bytes after an address divisible by 16. A plain array is an Input
    without offset.
    """

    array: np.ndarray
    offset: int = 0


@dataclass(frozen=True)
class InPlace:
    """An array that a kernel changes."""

    array: np.ndarray
    offset: int = 0


@dataclass(frozen=True)
class Result:
    """An array that a kernel fills."""

    shape: tuple[int, ...]
    dtype: object
    offset: int = 0


@dataclass(frozen=True)
class Late:
    """An array that the kernel before may still write or read: no thread may touch it before it has waited for that
    kernel.
    """

    argument: "np.ndarray | Input | InPlace | Result"


class Guarded:
    """An array at one end of a piece of memory between two guards, which raise a fault. The rest is poison.

    Args:
      argument: the array.
      at_end: whether the array is at the end, next to the upper guard; else at the beginning. An access past that end
        is a fault at once, and one past the other end touches poison first.
      poison: the byte.
    """

    def __init__(self, argument: Input | InPlace | Result, at_end: bool, poison: int):
        array = None if isinstance(argument, Result) else np.asarray(argument.array)
        self.shape, self.dtype = (
            (argument.shape, np.dtype(argument.dtype)) if array is None else (array.shape, array.dtype)
        )
        self.bytes = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        self.poison, self.read_only = poison, isinstance(argument, Input)
        wanted = argument.offset + self.bytes
        usable = -(-(wanted + 16) // mmap.PAGESIZE) * mmap.PAGESIZE
        begin = argument.offset + (usable - -(-wanted // 16) * 16 if at_end else 0)
        memory = mmap.mmap(-1, usable + 2 * GUARD, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.usable = np.frombuffer(memory, np.uint8, usable, GUARD)  # which keeps the memory
        self.usable[:] = poison
        self.inside = self.usable[begin : begin + self.bytes]
        self.outside = self.usable[:begin], self.usable[begin + self.bytes :]
        if array is not None:
            self.inside[:] = np.frombuffer(array.tobytes(), np.uint8)
        self.address, self.pages = base + GUARD + begin, (base + GUARD, usable)
        _protect(base, GUARD, 0)
        _protect(base + GUARD + usable, GUARD, 0)
        if self.read_only:
            _protect(base + GUARD, usable, mmap.PROT_READ)

    def contents(self) -> np.ndarray:
        return np.frombuffer(self.inside.tobytes(), self.dtype).reshape(self.shape)

    def is_intact(self) -> bool:
        """Whether the poison around the array is unchanged."""
        return self.read_only or all(np.all(part == self.poison) for part in self.outside)

    def distance(self, address: int) -> int:
        return max(self.address - address, address - (self.address + self.bytes), 0)

    def describe(self, address: int) -> str:
        at = address - self.address
        if 0 <= at < self.bytes:
            return f"a write to byte {at}, and it is an input"
        return f"byte {at}, and it has {self.bytes}"


def _protect(address, size, protection):
    if C_LIBRARY.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(protection)) != 0:
        raise OSError(f"mprotect failed for {size} bytes")

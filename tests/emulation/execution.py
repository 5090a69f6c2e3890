"""Calls compiled kernels in a process of their own, so that a kernel that writes to wrong addresses cannot harm the
memory of the test process.

The first call starts the process, which serves all later calls. If it dies, the call raises an error, and the next call
starts another.
"""

import atexit
import ctypes
import functools
import multiprocessing
import pathlib
from multiprocessing.connection import Connection

import numpy as np

from emulation.memory import Guarded, InPlace, Input, Late, Result


class EmulationError(RuntimeError):
    """A kernel broke a rule of CUDA, such as an access outside of its arrays."""


def call_elsewhere(
    library: pathlib.Path, entry: str, arguments: tuple, orders: list[tuple[int, int]]
) -> list[list[np.ndarray]]:
    """The results of an entry and the arrays it changed in place, for each (order of threads, poison)."""
    connection, process = _server()
    try:
        connection.send((library, entry, arguments, orders))
        results = connection.recv()
    except (EOFError, ConnectionError):
        _server.cache_clear()
        process.join()
        raise EmulationError(f"{entry}: a kernel ended its process, exit code {process.exitcode}") from None
    if isinstance(results, str):
        raise EmulationError(results)
    return results


@functools.cache
def _server() -> tuple[Connection, multiprocessing.process.BaseProcess]:
    context = multiprocessing.get_context("spawn")  # a fork would have the threads' locks and not the threads
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    atexit.register(ours.close)
    return ours, process


def _serve(connection):
    while True:
        try:
            library, entry, arguments, orders = connection.recv()
        except EOFError:
            return
        try:
            answer = [_call(_load(library), entry, arguments, *order) for order in orders]
        except EmulationError as error:
            answer = str(error)
        connection.send(answer)


@functools.cache
def _load(path):
    library = ctypes.CDLL(str(path))
    for function in (library.emulation_map_stacks, library.emulation_fault):
        function.restype = ctypes.c_void_p
    library.emulation_failure.restype = ctypes.c_char_p
    return library


def _call(library, entry, arguments, order, poison):
    arrays = {}

    def as_c(value, name):
        if isinstance(value, tuple | list):
            pointers = [as_c(element, f"{name}[{number}]").value for number, element in enumerate(value)]
            return (ctypes.c_void_p * len(value))(*pointers)
        is_late, value = isinstance(value, Late), value.argument if isinstance(value, Late) else value
        if isinstance(value, np.ndarray):
            value = Input(value)
        if isinstance(value, Input | InPlace | Result):
            arrays[name] = Guarded(value, at_end=order == 0, poison=poison)
            if is_late:
                begin, size = arrays[name].pages
                writable = ctypes.c_int64(not arrays[name].read_only)
                library.emulation_add_late(ctypes.c_void_p(begin), ctypes.c_int64(size), writable)
            return ctypes.c_void_p(arrays[name].address)
        if value is None:
            return ctypes.c_void_p()
        return ctypes.c_double(value) if isinstance(value, float | np.floating) else ctypes.c_int64(int(value))

    library.emulation_forget_late()
    passed = [as_c(value, f"argument {number}") for number, value in enumerate(arguments)]
    library.emulation_begin(ctypes.c_int64(order), ctypes.c_int64(poison), _stacks(library))
    status = getattr(library, entry)(*passed)
    library.emulation_forget_late()
    failure, fault = library.emulation_failure().decode(), library.emulation_fault()
    if fault is not None and arrays:
        nearest = min(arrays, key=lambda name: arrays[name].distance(fault))
        failure += f"; nearest is {nearest}: {arrays[nearest].describe(fault)}"
    if failure:
        raise EmulationError(f"{entry}: {failure}")
    if status != 0:
        raise EmulationError(f"{entry}: the launch must succeed, got CUDA error {status}")
    for name, array in arrays.items():
        if not array.is_intact():
            raise EmulationError(f"{entry}: {name} was written before its begin or behind its end")
    return [array.contents() for array in arrays.values() if not array.read_only]


_STACKS = []


def _stacks(library):
    """The stacks of the threads, for all libraries."""
    if not _STACKS:
        _STACKS.append(ctypes.c_void_p(library.emulation_map_stacks()))
    return _STACKS[0]

"""Named arrays in one safetensors file, which other programs read: https://huggingface.co/docs/safetensors.

    8 bytes: the length of the JSON │ JSON: dtype, shape and byte range of each array, and metadata │ the bytes

Reading maps the file into memory without a copy, and writing makes one array at a time. So a model needs no more of the
host's memory than its largest array. The library `safetensors` also checks each file that is read, so reading needs it.
"""

import importlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.files import Unreadable, parse_json, reading, replacing, shortened, shown

DTYPES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I32": "int32",
    "U32": "uint32",
    "U16": "uint16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
NAMES = {jnp.dtype(dtype): name for name, dtype in DTYPES.items()}
METADATA = "__metadata__"
ALIGNMENT = 8  # bytes
MOST_HEADER = 10**8  # bytes, the limit of the library
MOST_DIMS = 32  # of an array


@dataclass(frozen=True)
class Tensor:
    """An array to write; `make` returns it when its turn has come."""

    shape: tuple[int, ...]
    dtype: jax.typing.DTypeLike
    make: Callable[[], jax.Array | np.ndarray]

    @classmethod
    def from_array(cls, array: jax.Array | np.ndarray, dtype: jax.typing.DTypeLike | None = None) -> "Tensor":
        """An array of any device, to be written in its own dtype or in another one."""
        return cls(tuple(np.shape(array)), jnp.dtype(dtype or array.dtype), lambda: array)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class _Entry:
    """An array as a file describes it; its bytes are from `begin` to `end` after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def map_arrays(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """The arrays of a file, mapped: nothing of them is read yet. The library cannot return FP8 arrays, so this function
    finds their bytes itself.
    """
    entries, start = _checked_header(path)
    arrays, content = {}, np.memmap(path, np.uint8, "r")
    for name, entry in entries.items():
        if entry.dtype not in DTYPES:
            raise ValueError(
                f"{path} must have dtypes of {', '.join(DTYPES)}, got {shown(entry.dtype)[1:-1]} for "
                f"{shortened(name)}; convert it first"
            )
        dtype = jnp.dtype(DTYPES[entry.dtype])
        arrays[name] = content[start + entry.begin : start + entry.end].view(dtype).reshape(entry.shape)
    return arrays


def read_metadata(path: str | os.PathLike) -> dict[str, str]:
    """The texts that a file has beside its arrays, by name."""
    _checked_header(path)
    return _read_header(path).metadata


def write_arrays(
    path: str | os.PathLike,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    report: Callable[[int], None] = lambda written: None,
) -> None:
    """Write a file, and replace an older one at the end, even while programs map or write that one.

    Arrays with large elements come first, so that each array lies at a multiple of its element size. Equal sizes are
    sorted by name.

    Args:
      report: called after each array, with its bytes.
    """
    for name, tensor in tensors.items():
        _check_can_be_written(name, tensor)
    ordered = sorted(tensors.items(), key=lambda item: (-jnp.dtype(item[1].dtype).itemsize, item[0]))
    header = _make_header(ordered, metadata)
    try:
        with replacing(path) as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for _, tensor in ordered:
                array = np.ascontiguousarray(tensor.make(), tensor.dtype)
                assert array.size == math.prod(tensor.shape)
                file.write(array.reshape(-1).view(np.uint8).data)
                report(tensor.nbytes)
    except OSError as error:
        raise ValueError(f"params must find room in {path}, got {error}; choose another folder") from error


def _check_can_be_written(name: str, tensor: Tensor) -> None:
    """Raise unless a reader can find the array under this name, and in this dtype."""
    if name == METADATA or not name.isprintable():
        raise ValueError(f"the name of an array in a file must be plain text other than {METADATA}, got {shown(name)}")
    if jnp.dtype(tensor.dtype) not in NAMES:
        raise ValueError(
            f"arrays in a safetensors file must be of {', '.join(DTYPES.values())}, got "
            f"{jnp.dtype(tensor.dtype).name} for {name}; pass dtype, or cast it first"
        )


def _make_header(ordered: list[tuple[str, Tensor]], metadata: Mapping[str, str] | None) -> bytes:
    header: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        dtype = NAMES[jnp.dtype(tensor.dtype)]
        header[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": (begin, end)}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % ALIGNMENT)


def _checked_header(path: str | os.PathLike) -> tuple[dict[str, _Entry], int]:
    """The entries of all arrays, in the library's order, and the offset at which their bytes begin."""
    library = _library("safetensors")
    try:
        header = _read_header(path)
        entries = {name: _entry(name, described) for name, described in header.arrays.items()}
        _check_offsets(entries, header.file_size - header.start)
        with library.safe_open(os.fspath(path), framework="np") as file:  # the library repeats these checks
            return {name: entries[name] for name in file.keys()}, header.start
    except (Unreadable, OSError, library.SafetensorError) as error:
        raise ValueError(f"{path} must be a whole safetensors file, got {error}; copy it again") from None


@dataclass(frozen=True)
class _Header:
    """The JSON of a file, not yet checked array by array; the bytes of arrays begin at `start`."""

    arrays: dict[str, object]
    metadata: dict[str, str]
    start: int
    file_size: int


def _read_header(path: str | os.PathLike) -> _Header:
    with reading(path) as file:
        file_size = os.fstat(file.fileno()).st_size
        size = int.from_bytes(file.read(8), "little")
        if file_size < 8 or size > min(MOST_HEADER, file_size - 8):
            raise Unreadable(f"a header of {size:,} bytes in a file of {file_size:,}")
        arrays = parse_json(file.read(size))
    metadata = arrays.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Unreadable(f"metadata that is no object of texts, {shown(metadata)}")
    return _Header(arrays, metadata, 8 + size, file_size)


def _entry(name: str, described: object) -> _Entry:
    """An entry of the header, or `Unreadable` where its fields have other types."""
    if isinstance(described, dict) and set(described) == {"dtype", "shape", "data_offsets"}:
        dtype, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
        if isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(offsets):
            if len(offsets) == 2 and len(shape) <= MOST_DIMS:
                return _Entry(dtype, tuple(shape), *offsets)
    raise Unreadable(f"no dtype, shape and offsets for {shown(name)} but {shown(described)}")


def _are_sizes(sizes: object) -> bool:
    return isinstance(sizes, list) and all(
        isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**63 for size in sizes
    )


def _check_offsets(entries: dict[str, _Entry], room: int) -> None:
    """Raise unless arrays lie side by side and fill `room` bytes, each with as many bytes as its shape needs."""
    ranges = sorted((entry.begin, entry.end, name) for name, entry in entries.items())
    ends = [0, *(end for _, end, _ in ranges)]
    for (begin, end, name), before in zip(ranges, ends, strict=False):
        if begin != before or end < begin:
            raise Unreadable(f"bytes {begin:,} to {end:,} for {shown(name)}, where those before it end at {before:,}")
        dtype, elements = entries[name].dtype, math.prod(entries[name].shape)
        if dtype in DTYPES and elements * jnp.dtype(DTYPES[dtype]).itemsize != end - begin:
            raise Unreadable(f"{end - begin:,} bytes for {elements:,} elements of {shown(name)}")
    if ends[-1] != room:
        raise Unreadable(f"{room:,} bytes of arrays, where the header describes {ends[-1]:,}")


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "safetensors":
            raise
        raise ValueError(
            "reading params needs the library safetensors, which is not installed; pip install safetensors"
        ) from error

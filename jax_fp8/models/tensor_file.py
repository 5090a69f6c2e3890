"""Named arrays in one safetensors file, which other programs read: https://huggingface.co/docs/safetensors.

    8 bytes: how long the JSON is │ JSON: of each name dtype, shape, where its bytes are; and metadata │ the bytes

What is read is mapped into memory and not copied, what is written is made one array at a time: a model needs no more of
the host's memory than its largest array. The library `safetensors` checks a file that is read, and is asked for then.
"""

import importlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
MOST_HEADER = 10**8  # bytes, as the library has it
MOST_DIMS = 32  # of an array


@dataclass(frozen=True)
class Tensor:
    """An array that is made when it is written."""

    shape: tuple[int, ...]
    dtype: Any
    make: Callable[[], Any]

    @classmethod
    def of(cls, array: Any, dtype: Any = None) -> "Tensor":
        """Of one that is there, on whatever device; in another dtype on wish."""
        return cls(tuple(np.shape(array)), jnp.dtype(dtype or array.dtype), lambda: array)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def map_arrays(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """The arrays of a file, of which nothing is read yet. The library has no arrays of FP8 to return, so where they
    begin is read here.
    """
    described, start = _checked_header(path)
    found, content = {}, np.memmap(path, np.uint8, "r")
    for name, entry in described.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(
                f"{path} must have dtypes of {', '.join(DTYPES)}, got {shown(entry['dtype'])[1:-1]} for "
                f"{shortened(name)}; convert it first"
            )
        (begin, end), shape = entry["data_offsets"], tuple(entry["shape"])
        dtype = jnp.dtype(DTYPES[entry["dtype"]])
        found[name] = content[start + begin : start + end].view(dtype).reshape(shape)
    return found


def read_metadata(path: str | os.PathLike) -> dict[str, str]:
    """What a file says beside its arrays."""
    _checked_header(path)
    return _read_header(path)[0].get(METADATA, {})


def write_arrays(
    path: str | os.PathLike,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    report: Callable[[int], None] = lambda written: None,
) -> None:
    """Write a file: large elements first, so that each lies at a multiple of its size, then by name. One that is there
    is replaced in the end, also where it is mapped, and whoever else writes it.

    Args:
      report: called with the bytes of each array, when it is written.
    """
    for name, tensor in tensors.items():
        _check_can_be_written(name, tensor)
    ordered = sorted(tensors.items(), key=lambda item: (-jnp.dtype(item[1].dtype).itemsize, item[0]))
    header = _header_of(ordered, metadata)
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
    """Raise unless a reader finds the array again, under its name and in its dtype."""
    if name == METADATA or not name.isprintable():
        raise ValueError(f"the name of an array in a file must be plain text other than {METADATA}, got {shown(name)}")
    if jnp.dtype(tensor.dtype) not in NAMES:
        raise ValueError(
            f"arrays in a safetensors file must be of {', '.join(DTYPES.values())}, got "
            f"{jnp.dtype(tensor.dtype).name} for {name}; pass dtype, or cast it first"
        )


def _header_of(ordered: list[tuple[str, Tensor]], metadata: Mapping[str, str] | None) -> bytes:
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        described = {"dtype": NAMES[jnp.dtype(tensor.dtype)], "shape": tensor.shape, "data_offsets": (begin, end)}
        header[name] = described
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % ALIGNMENT)


def _checked_header(path) -> tuple[dict[str, dict[str, Any]], int]:
    """What the file says of each array, in the order of the library, and where the bytes begin."""
    library = _library("safetensors")
    try:
        header, start, size = _read_header(path)
        described = {name: _entry(name, entry) for name, entry in header.items() if name != METADATA}
        _check_offsets(described, size - start)
        with library.safe_open(os.fspath(path), framework="np") as file:  # which checks all of it again
            return {name: described[name] for name in file.keys()}, start
    except (Unreadable, OSError, library.SafetensorError) as error:
        raise ValueError(f"{path} must be a whole safetensors file, got {error}; copy it again") from None


def _read_header(path) -> tuple[dict[str, Any], int, int]:
    """The JSON, where the bytes of arrays begin, and how many bytes the file has."""
    with reading(path) as file:
        whole = os.fstat(file.fileno()).st_size
        size = int.from_bytes(file.read(8), "little")
        if whole < 8 or size > min(MOST_HEADER, whole - 8):
            raise Unreadable(f"a header of {size:,} bytes in a file of {whole:,}")
        header = parse_json(file.read(size))
    metadata = header.get(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Unreadable(f"metadata that is no object of texts, {shown(metadata)}")
    return header, 8 + size, whole


def _entry(name: str, entry: Any) -> dict[str, Any]:
    """What a header says of an array, once it has the types that this must have."""
    if isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"} and isinstance(entry["dtype"], str):
        shape, offsets = entry["shape"], entry["data_offsets"]
        if all(isinstance(sizes, list) and all(map(_is_size, sizes)) for sizes in (shape, offsets)):
            if len(offsets) == 2 and len(shape) <= MOST_DIMS:
                return entry
    raise Unreadable(f"no dtype, shape and offsets for {shown(name)} but {shown(entry)}")


def _is_size(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**63


def _check_offsets(described: dict[str, dict[str, Any]], room: int) -> None:
    """Raise unless arrays lie side by side, each with as many bytes as its shape says."""
    places = sorted((*entry["data_offsets"], name) for name, entry in described.items())
    ends = [0, *(end for _, end, _ in places)]
    for (begin, end, name), before in zip(places, ends, strict=False):
        if begin != before or end < begin:
            raise Unreadable(f"bytes {begin:,} to {end:,} for {shown(name)}, where those before it end at {before:,}")
        dtype, elements = described[name]["dtype"], math.prod(described[name]["shape"])
        if dtype in DTYPES and elements * jnp.dtype(DTYPES[dtype]).itemsize != end - begin:
            raise Unreadable(f"{end - begin:,} bytes for {elements:,} elements of {shown(name)}")
    if ends[-1] != room:
        raise Unreadable(f"{room:,} bytes of arrays, where the header tells of {ends[-1]:,}")


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "safetensors":
            raise
        raise ValueError(
            "params are read by the library safetensors, which is not installed; pip install safetensors"
        ) from error

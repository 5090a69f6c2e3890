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
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

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
    try:
        with _library("safetensors").safe_open(os.fspath(path), framework="np") as file:  # which checks all of it
            names = list(file.keys())
    except _library("safetensors").SafetensorError as error:
        raise ValueError(f"{path} must be a whole safetensors file, got {error}; copy it again") from error
    header, start = _header(path)
    found = {}
    for name in names:
        described = header[name]
        if described["dtype"] not in DTYPES:
            raise ValueError(
                f"{path} must have dtypes of {', '.join(DTYPES)}, got {described['dtype']} for {name}; convert it first"
            )
        begin, shape = described["data_offsets"][0], tuple(described["shape"])
        dtype = jnp.dtype(DTYPES[described["dtype"]])
        if math.prod(shape):
            found[name] = np.memmap(path, dtype, "r", start + begin, shape)
        else:  # nothing, which cannot be mapped
            found[name] = np.zeros(shape, dtype)
    return found


def read_metadata(path: str | os.PathLike) -> dict[str, str]:
    """What a file says beside its arrays."""
    map_arrays(path)  # which checks it
    return _header(path)[0].get(METADATA, {})


def write_arrays(
    path: str | os.PathLike,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    report: Callable[[int], None] = lambda written: None,
) -> None:
    """Write a file: large elements first, so that each lies at a multiple of its size, then by name. One that is there
    is replaced in the end, also where it is mapped.

    Args:
      report: called with the bytes of each array, when it is written.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-jnp.dtype(item[1].dtype).itemsize, item[0]))
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        described = {"dtype": NAMES[jnp.dtype(tensor.dtype)], "shape": tensor.shape, "data_offsets": (begin, end)}
        header[name] = described
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    unfinished = Path(f"{os.fspath(path)}.part")
    try:
        with open(unfinished, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, tensor in ordered:
                array = np.ascontiguousarray(tensor.make(), tensor.dtype)
                assert array.size == math.prod(tensor.shape)
                file.write(array.reshape(-1).view(np.uint8).data)
                report(tensor.nbytes)
        os.replace(unfinished, path)
    except OSError as error:
        raise ValueError(f"params must find room in {path}, got {error}; choose another folder") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _header(path) -> tuple[dict[str, Any], int]:
    """The JSON, and where the bytes begin."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(size)), 8 + size


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "safetensors":
            raise
        raise ValueError(
            "params are read by the library safetensors, which is not installed; pip install safetensors"
        ) from error

"""Params as one plain file, for other programs: safetensors, with the names that lead to each array joined by ".".

    {"layer_0": {"mlp": {"up": {"kernel": ...}}}}  ↔  layer_0.mlp.up.kernel

Dtypes stay as they are, also bfloat16 and FP8. A file has params alone: to go on with a training run, save its whole
state. The library `safetensors` is asked for when a file is read or written, and not before.
"""

import importlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.checks import describe
from jax_fp8.core.paths import put_at_path

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


def save_params(path: str | os.PathLike, params: Mapping) -> None:
    """Write params to a safetensors file; one that is there is replaced.

    Args:
      path: conventionally `*.safetensors`.
      params: nested dicts of arrays, as `variables["params"]` or `state.params`. Those on several devices are gathered.
    """
    arrays = {}
    for name, leaf in _named(params).items():
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ValueError(
                f"params to save must lie on devices of this process, but {name} does not; gather them first, as "
                "jax.experimental.multihost_utils.process_allgather(params, tiled=True) does"
            )
        arrays[name] = np.ascontiguousarray(leaf).reshape(np.shape(leaf))
    try:
        _library("safetensors.numpy").save_file(arrays, os.fspath(path))
    except _library("safetensors").SafetensorError as error:
        raise ValueError(f"params must find room in {path}, got {error}; choose another folder") from error


def load_params(path: str | os.PathLike, like: Any = None) -> Any:
    """Read what `save_params` wrote, or any safetensors file whose names are paths.

    Args:
      path: the file.
      like: params, or their shapes, as of `step.state_shapes(...).params`: the file must have the same arrays, and they
        are put where these are. None reads nested dicts of what is there, onto the default device.
    """
    if not Path(path).is_file():
        raise ValueError(f"params must be read from a file, but there is none at {path}; save one by save_params")
    arrays = _mapped(path)
    if like is None:
        found: dict = {}
        for name, array in arrays.items():
            *parents, last = name.split(".")
            put_at_path(found, tuple(parents), {last: jnp.array(array)})
        return found
    wanted = _named(like)
    _check_names(path, set(arrays), set(wanted))
    leaves = [_like(path, name, arrays[name], leaf) for name, leaf in wanted.items()]
    return jax.tree.structure(like).unflatten(leaves)


def _mapped(path) -> dict[str, np.ndarray]:
    """The arrays of a file, of which nothing is read yet. The library has no arrays of FP8 to return, so where they
    begin is read here: 8 bytes say how long the JSON is that says it.
    """
    try:
        with _library("safetensors").safe_open(os.fspath(path), framework="np") as file:  # which checks all of it
            names = list(file.keys())
    except _library("safetensors").SafetensorError as error:
        raise ValueError(f"{path} must be a whole safetensors file, got {error}; copy it again") from error
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
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
            found[name] = np.memmap(path, dtype, "r", 8 + size + begin, shape)
        else:  # nothing, which cannot be mapped
            found[name] = np.zeros(shape, dtype)
    return found


def _named(params) -> dict[str, Any]:
    """The leaves by their names, in the order of the tree."""
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = [str(getattr(key, "key", getattr(key, "name", None))) for key in path]
        if not path or "None" in names or any("." in name for name in names):
            arrived = jax.tree_util.keystr(path) or describe(leaf)
            raise ValueError(f'params must be nested dicts, with names that have no ".", got {arrived}; rename them')
        named[".".join(names)] = leaf
    return named


def _check_names(path, names, wanted) -> None:
    for name in sorted(names ^ wanted):
        here, there = ("the file", "the model") if name in names else ("the model", "the file")
        raise ValueError(
            f"{path} must have the params of the model, but {name} is in {here} and not in {there}; rename it"
        )


def _like(path, name, array, leaf) -> jax.Array:
    if array.shape != leaf.shape or array.dtype != leaf.dtype:
        raise ValueError(
            f"{name} in {path} must be {leaf.dtype}{list(leaf.shape)} as in the model, got "
            f"{array.dtype}{list(array.shape)}; convert it first"
        )
    sharding = getattr(leaf, "sharding", None)
    return jnp.array(array) if sharding is None else jax.device_put(array, sharding, may_alias=False)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "safetensors":
            raise
        raise ValueError(
            "params are written and read by the library safetensors, which is not installed; pip install safetensors"
        ) from error

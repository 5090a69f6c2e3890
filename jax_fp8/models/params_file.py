"""Params as one safetensors file that other programs can read. The name of an array is its path, joined by ".".

    {"layer_0": {"mlp": {"up": {"kernel": ...}}}}  ↔  layer_0.mlp.up.kernel

Dtypes stay as they are, bfloat16 and FP8 too. A file holds params, and the shape of their model where that is given. To
continue a training run, save its whole state instead.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype

from jax_fp8.core.checks import describe
from jax_fp8.core.files import MOST_DEPTH, Unreadable, parse_json, shortened, shown
from jax_fp8.core.paths import put_at_path
from jax_fp8.core.types import PyTree
from jax_fp8.models.config import GPTConfig
from jax_fp8.models.limits import config_of
from jax_fp8.models.tensor_file import Tensor, map_arrays, read_metadata, write_arrays

CONFIG = "jax_fp8.GPTConfig"  # the name of the JSON in the file's metadata


def save_params(
    path: str | os.PathLike,
    params: PyTree,
    config: GPTConfig | None = None,
    *,
    dtype: Dtype | None = None,
    report: Callable[[int], None] = lambda written: None,
) -> None:
    """Write params to a safetensors file; an older file at this path is replaced.

    Args:
      path: conventionally `*.safetensors`.
      params: nested dicts of arrays, as `variables["params"]` or `state.params`, also of arrays on several devices.
      config: the shape of their model, which `load_config` returns.
      dtype: of all arrays in the file; None keeps the dtype of each.
      report: called after each array, with its bytes.

    Raises:
      ValueError: if `params` are not nested dicts of plain arrays of this process, a name has a ".", `config` is not a
        GPTConfig, or the file cannot be written.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> fp8.save_params("layer.safetensors", {"up": {"kernel": jnp.ones((16, 32))}}, dtype=jnp.bfloat16)
      >>> fp8.load_params("layer.safetensors")["up"]["kernel"].dtype.name
      'bfloat16'
    """
    if config is not None and not isinstance(config, GPTConfig):
        raise ValueError(f"config must be a GPTConfig or None, got {describe(config)}; pass that of the model")
    tensors = {}
    for name, leaf in named_leaves(params).items():
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ValueError(
                f"params to save must lie on devices of this process, but {name} does not; gather them first, as "
                "jax.experimental.multihost_utils.process_allgather(params, tiled=True) does"
            )
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise ValueError(
                f"params to save must be plain arrays, got {describe(leaf)} for {name}; take jax.random.key_data(key)"
            )
        tensors[name] = Tensor.from_array(leaf if hasattr(leaf, "dtype") else np.asarray(leaf), dtype)
    metadata = None if config is None else {CONFIG: json.dumps(dataclasses.asdict(config))}
    write_arrays(path, tensors, metadata, report)


def load_params(path: str | os.PathLike, like: PyTree = None) -> PyTree:
    """Read a file of `save_params`, or any safetensors file whose names are paths.

    Args:
      path: the file.
      like: params, or their shapes, such as `step.state_shapes(...).params`. The file must have the same arrays, and
        each is put on the devices of its counterpart. None reads all arrays as nested dicts onto the default device.

    Returns:
      The params as jax arrays in the dtypes of the file, in nested dicts or in the structure of `like`.

    Raises:
      ValueError: if there is no such file, it is not a safetensors file, or its arrays are not those of `like`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> fp8.save_params("bias.safetensors", {"bias": jnp.ones(16)})
      >>> like = {"bias": jax.ShapeDtypeStruct((16,), jnp.float32)}
      >>> fp8.load_params("bias.safetensors", like)["bias"].shape
      (16,)
    """
    if like is None:
        return jax.tree.map(jnp.array, map_params(path))
    _check_is_file(path)
    arrays = map_arrays(path)
    expected = named_leaves(like)
    _check_names(path, set(arrays), set(expected))
    leaves = [_placed_like(path, name, arrays[name], leaf) for name, leaf in expected.items()]
    return jax.tree.structure(like).unflatten(leaves)


def load_config(path: str | os.PathLike) -> GPTConfig:
    """Read the shape of the model from a file that `save_params` or `python -m jax_fp8 convert` wrote.

    Args:
      path: the file.

    Returns:
      The config that was saved beside the params.

    Raises:
      ValueError: if there is no such file, or it has no config that can be read.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> config = fp8.GPTConfig.preset("tiny")
      >>> fp8.save_params("tiny.safetensors", {"bias": jnp.ones(16)}, config)
      >>> fp8.load_config("tiny.safetensors") == config
      True
    """
    _check_is_file(path)
    described = read_metadata(path).get(CONFIG)
    if described is None:
        raise ValueError(
            f"{path} must have the shape of its model, but has params alone; save them by "
            "save_params(path, params, config)"
        )
    try:
        return config_of(parse_json(described), str(path))
    except Unreadable as error:
        raise ValueError(f"{path} must describe its model in JSON, got {error}; save it again") from None


def map_params(path: str | os.PathLike) -> dict[str, PyTree]:
    """The arrays of a file as nested dicts of NumPy arrays, mapped: nothing of them is read yet."""
    _check_is_file(path)
    arrays = map_arrays(path)
    _check_is_tree(path, arrays)
    params: dict[str, PyTree] = {}
    for name, array in arrays.items():
        *parents, last = name.split(".")
        put_at_path(params, tuple(parents), {last: array})
    return params


def named_leaves(params: PyTree) -> dict[str, jax.Array]:
    """The leaves by their names, in the order of the tree."""
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = [str(getattr(key, "key", getattr(key, "name", None))) for key in path]
        if not path or "None" in names or any("." in name for name in names):
            arrived = jax.tree_util.keystr(path) or describe(leaf)
            raise ValueError(f'params must be nested dicts, with names that have no ".", got {arrived}; rename them')
        named[".".join(names)] = leaf
    return named


def _check_is_file(path: str | os.PathLike) -> None:
    if not os.path.isfile(path):
        raise ValueError(f"params must be read from a file, but there is none at {path}; save one by save_params")


def _check_is_tree(path: str | os.PathLike, names: Collection[str]) -> None:
    """Raise where a name has too many parts, or is both an array and the beginning of another array's name."""
    for name in names:
        parts = name.split(".", MOST_DEPTH)
        if len(parts) > MOST_DEPTH:
            raise ValueError(f"{path} must have names of at most {MOST_DEPTH} parts, got {shown(name)}; rename it")
        for number in range(1, len(parts)):
            parent = ".".join(parts[:number])
            if parent in names:
                raise ValueError(
                    f"{path} must have names that are paths to one array each, got {shortened(parent)} and "
                    f"{shortened(name)}; rename one"
                )


def _check_names(path: str | os.PathLike, names: set[str], expected: set[str]) -> None:
    for name in sorted(names ^ expected):
        here, there = ("the file", "the model") if name in names else ("the model", "the file")
        raise ValueError(
            f"{path} must have the params of the model, but {shortened(name)} is in {here} and not in {there}; "
            "rename it"
        )


def _placed_like(path: str | os.PathLike, name: str, array: np.ndarray, leaf: jax.Array) -> jax.Array:
    if array.shape != leaf.shape or array.dtype != leaf.dtype:
        raise ValueError(
            f"{name} in {path} must be {leaf.dtype}{list(leaf.shape)} as in the model, got "
            f"{array.dtype}{list(array.shape)}; convert it first"
        )
    sharding = getattr(leaf, "sharding", None)
    return jnp.array(array) if sharding is None else jax.device_put(array, sharding, may_alias=False)

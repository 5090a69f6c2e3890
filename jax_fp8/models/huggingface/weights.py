"""Folders of Hugging Face in and out: config.json, and model.safetensors or its parts with their index.

    load_huggingface   folder → GPTConfig, params: NumPy arrays, mapped from the files
    save_huggingface   GPTConfig, params → folder, one tensor at a time

Both keep every number, unless the caller asks for another dtype.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype

from jax_fp8.core.checks import check_bool, check_integer, describe
from jax_fp8.core.files import is_plain_name, shortened, shown
from jax_fp8.core.formats import E4M3
from jax_fp8.core.paths import LayerPath, put_at_path
from jax_fp8.core.recipe import BlockScaling, CurrentScaling
from jax_fp8.core.types import PyTree
from jax_fp8.models.config import GPTConfig
from jax_fp8.models.huggingface.config_json import family_of, read_config, write_config
from jax_fp8.models.huggingface.frozen import frozen_variables
from jax_fp8.models.huggingface.json_files import read_object, write_object
from jax_fp8.models.huggingface.layouts import Entry, entries_of
from jax_fp8.models.huggingface.naming import named_as_whole_models, tied, without_predictions
from jax_fp8.models.huggingface.quantized import FIELD, WRITTEN, block_of, dequantized, quantized
from jax_fp8.models.params_file import named_leaves
from jax_fp8.models.tensor_file import Tensor, map_arrays, write_arrays
from jax_fp8.nn.checks import check_dtype

WHOLE, INDEX, SETTINGS = "model.safetensors", "model.safetensors.index.json", "config.json"
DTYPES = ("float32", "bfloat16", "float16")
LARGEST_PART = 5 * 10**9  # bytes
MOST_SETTINGS = 2**20  # bytes of a config.json


def load_huggingface(path: str | os.PathLike, *, dtype: Dtype | None = None) -> tuple[GPTConfig, dict[str, PyTree]]:
    """Read a model of Hugging Face.

    It is Llama, Mistral, Mixtral, Qwen2, Qwen2.5, Qwen3 (each dense or with experts), GLM-4.5 (text), Gemma 2, Gemma 3
    (text), OLMo 2, OLMo 3, Phi-3, Phi-4, SmolLM3, Granite or GPT-2.

    Args:
      path: its folder, with config.json and safetensors files; or one such file beside its config.json.
      dtype: of the params; None keeps the dtypes of the files. Weights in FP8 with scales of squares become bfloat16.
        `jax_fp8.E4M3` freezes the kernels of the layers in FP8, one byte an element, on the default device: with one
        scale for each GEMM, or with one for each square of 128 x 128 where the files have such scales.

    Returns:
      The config, and the params of `GPT(config)` as nested dicts of NumPy arrays in the host's memory. Without `dtype`
      they are mapped from the files, which must stay there: nothing is read before it is used. Only experts, which have
      one tensor each, are stacked in memory. `jax.device_put(params)` puts params on a device, `step.place(state)` on a
      mesh. With `dtype=jax_fp8.E4M3` it is the config, and the variables {"params": ..., "fp8_frozen": ...}: of a model
      with `recipe=None`, which multiplies by the FP8 weights in its own dtype, or with `CurrentScaling()`; where the
      files have scales of squares, with `BlockScaling()`. Kernels of experts stay params.

    Raises:
      ValueError: if there are no such files, config.json describes another kind of model, or tensors do not fit it.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> config = fp8.GPTConfig(vocab_size=32, num_layers=1, num_heads=1, hidden_size=16)
      >>> variables = jax.jit(fp8.GPT(config).init)(jax.random.key(0), jnp.ones((1, 2), jnp.int32))
      >>> fp8.save_huggingface("gpt2", config, variables["params"])
      >>> loaded, params = fp8.load_huggingface("gpt2")
      >>> loaded.hidden_size, params["embedding"].shape
      (16, (32, 16))
    """
    is_frozen = dtype == E4M3
    if dtype is not None and not is_frozen:
        check_dtype("dtype", dtype)
    dtype = None if is_frozen else dtype
    files = _files_of(Path(path))
    settings = (files[0].parent if os.path.isfile(path) else Path(path)) / SETTINGS
    described = read_object(settings, "it has the shape of the model", MOST_SETTINGS)
    config = read_config(described, str(settings))
    tensors, block = named_as_whole_models(_map_all(files)), block_of(described, str(settings))
    tensors = without_predictions(tensors, described, config.num_layers)
    tensors = tensors if block is None else dequantized(tensors, block, str(path), dtype or jnp.bfloat16)
    config, tensors = tied(config, tensors)
    _check_has_layers(path, tensors, config)
    entries = entries_of(config, str(described["model_type"]))
    _check_tensors(path, tensors, entries)
    params: dict[str, PyTree] = {}
    for param_path, param in _whole_params(entries, tensors, dtype):
        *parents, last = param_path
        put_at_path(params, tuple(parents), {last: param})
    if is_frozen:
        by_square = BlockScaling(power_2_scale=False)  # gives back the values of the files
        return config, frozen_variables(config, params, CurrentScaling() if block is None else by_square)
    return config, params


def save_huggingface(
    folder: str | os.PathLike,
    config: GPTConfig,
    params: PyTree,
    *,
    dtype: Dtype | None = None,
    vocab_size: int | None = None,
    max_part_bytes: int = LARGEST_PART,
    model_type: str | None = None,
    in_fp8: bool = False,
    report: Callable[[int], None] = lambda written: None,
) -> None:
    """Write params as a model of Hugging Face: config.json and safetensors files, which `transformers` loads.

    The layout is that of the first family that fits the config, of those that `load_huggingface` reads; other shapes
    are refused. Tokenizer and generation_config.json are not written: copy them from the model that training began
    with.

    Args:
      folder: is created; must not have a model yet.
      config: of the model.
      params: of `GPT(config)`, on any devices of this process.
      dtype: of the files; None keeps the dtype of each array.
      vocab_size: the number of real tokens, where the vocabulary of `config` is padded: later rows are left out.
      max_part_bytes: a larger model is written as several files with an index.
      model_type: the family of the layout, such as "mistral"; None: the first one that fits. Several fit where a model
        does not use what sets a family apart, such as the window of Mistral.
      in_fp8: write the weights of linear maps in FP8, with a scale for each square of 128 x 128. The rest has `dtype`.
      report: called after each tensor, with its bytes.

    Raises:
      ValueError: if no layout fits the config, the params are not those of the config, or the folder has a model or
        cannot be written.

    Example:
      >>> import os
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> config = fp8.GPTConfig(vocab_size=32, num_layers=1, num_heads=1, hidden_size=16)
      >>> variables = jax.jit(fp8.GPT(config).init)(jax.random.key(0), jnp.ones((1, 2), jnp.int32))
      >>> fp8.save_huggingface("model", config, variables["params"])
      >>> sorted(os.listdir("model"))
      ['config.json', 'model.safetensors']
    """
    if dtype is not None:
        check_dtype("dtype", dtype)
    check_integer("max_part_bytes", max_part_bytes)
    check_bool("in_fp8", in_fp8)
    if not isinstance(config, GPTConfig):
        raise ValueError(f"config must be a GPTConfig, got {describe(config)}; pass that of the model")
    family = family_of(config, model_type)
    tensors = _make_tensors(config, family, params, dtype, vocab_size, in_fp8)
    config = config if vocab_size is None else replace(config, vocab_size=vocab_size)
    parts = _parts(tensors, max_part_bytes)
    described = write_config(config, family, jnp.dtype(next(iter(tensors.values())).dtype).name)
    folder = Path(folder)
    _make_folder(folder)
    for name, part in parts.items():
        write_arrays(folder / name, part, {"format": "pt"}, report)
    if len(parts) > 1:
        part_of = {name: file for file, part in parts.items() for name in part}
        total = sum(tensor.nbytes for tensor in tensors.values())
        write_object(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": part_of})
    write_object(folder / SETTINGS, described | ({FIELD: WRITTEN} if in_fp8 else {}))


# ---- in --------------------------------------------------------------------------------------------------------------


def _files_of(path: Path) -> list[Path]:
    if os.path.isfile(path):
        return [path]
    if not os.path.isdir(path):
        raise ValueError(f"a model of Hugging Face must be a folder, or a file in it, but there is none at {path}")
    if os.path.isfile(path / WHOLE):
        return [path / WHOLE]
    if not os.path.exists(path / INDEX):
        others = ", ".join(sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pth", ".gguf")))
        arrived = others or "no such file"
        raise ValueError(
            f"{path} must have {WHOLE}, or its parts with {INDEX}, got {arrived}; save it as safetensors first"
        )
    part_of = read_object(path / INDEX, "it names the parts").get("weight_map")
    if not isinstance(part_of, dict):
        raise ValueError(f"{path / INDEX} must have an object weight_map, got {shown(part_of)}; copy it again")
    wrong = [name for name in part_of.values() if not is_plain_name(name)]
    if wrong:
        raise ValueError(f"{path / INDEX} must name files of its own folder, got {shown(wrong[0])}; copy it again")
    files = [path / name for name in sorted(set(part_of.values()))]
    missing = [file.name for file in files if not os.path.isfile(file)]
    if missing or not files:
        lacks = shown(missing) if missing else "all"
        raise ValueError(f"{path / INDEX} must name files that are there, but lacks {lacks}; copy it again")
    return files


def _map_all(files: Iterable[Path]) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        arrays = map_arrays(file)
        twice = sorted(set(arrays) & set(tensors))
        if twice:
            raise ValueError(
                f"each tensor must be in one file, but {shortened(twice[0])} is also in {file}; copy the model again"
            )
        tensors |= arrays
    return tensors


def _check_has_layers(path: str | os.PathLike, tensors: Mapping[str, np.ndarray], config: GPTConfig) -> None:
    """Raise where there are fewer tensors than layers and experts. This runs before a table of a model of that size is
    made, which a wrong config.json could make huge.
    """
    least = sum(max(config.layer_fields(index)["num_experts"], 1) for index in range(config.num_layers))
    if len(tensors) < least:
        raise ValueError(
            f"{path} must have all tensors of its config.json, at least {least:,} for {config.num_layers:,} layers, "
            f"got {len(tensors):,}; copy it again"
        )


def _check_tensors(path: str | os.PathLike, tensors: Mapping[str, np.ndarray], entries: list[Entry]) -> None:
    wanted = {entry.name: entry for entry in entries}
    missing = [name for name in wanted if name not in tensors]
    if missing:
        raise ValueError(f"{path} must have all tensors of its config.json, but {missing[0]} is missing; copy it again")
    extra = sorted(set(tensors) - set(wanted))
    if extra:
        raise ValueError(
            f"{path} must have the tensors of its config.json alone, got also {shortened(extra[0])}, of another model"
        )
    for name, entry in wanted.items():
        tensor = tensors[name]
        if tensor.dtype.name not in DTYPES:
            raise ValueError(
                f"{name} in {path} must be of {', '.join(DTYPES)}, got {tensor.dtype}; take weights that are not "
                "quantized"
            )
        if tensor.shape != entry.shape:
            raise ValueError(
                f"{name} in {path} must have the shape {list(entry.shape)} that follows from config.json, got "
                f"{list(tensor.shape)}"
            )


def _whole_params(
    entries: list[Entry], tensors: Mapping[str, np.ndarray], dtype: Dtype | None
) -> Iterator[tuple[LayerPath, np.ndarray]]:
    """Params in `dtype` with their paths; the tensors of experts are stacked into one param."""
    of_experts: dict[LayerPath, list[np.ndarray]] = {}
    for entry in entries:
        for path, param in zip(entry.paths, entry.params_of(tensors[entry.name]), strict=True):
            if entry.expert is None:
                own_dtype = np.float32 if entry.stays_float32 else dtype
                yield path, param if own_dtype is None else param.astype(own_dtype)
            else:
                of_experts.setdefault(path, []).append(param)
    for path, params in of_experts.items():
        whole = np.stack(params)
        yield path, whole if dtype is None else whole.astype(dtype)


# ---- out -------------------------------------------------------------------------------------------------------------


def _make_tensors(
    config: GPTConfig, family: str, params: PyTree, dtype: Dtype | None, vocab_size: int | None, in_fp8: bool
) -> dict[str, Tensor]:
    if vocab_size is not None:
        check_integer("vocab_size", vocab_size, most=config.vocab_size)
    leaves, tensors = named_leaves(params), {}
    entries = entries_of(config, family)
    shapes = {".".join(path): shape for entry in entries for path, shape in zip(entry.paths, entry.shapes, strict=True)}
    for name in sorted(set(shapes) ^ set(leaves)):
        here, there = ("the config", "the params") if name in shapes else ("the params", "the config")
        raise ValueError(f"params must be those of the config, but {name} is in {here} and not in {there}")
    for name, leaf in leaves.items():
        if leaf.shape != shapes[name] or jnp.dtype(leaf.dtype).name not in DTYPES:
            raise ValueError(
                f"{name} must be of shape {list(shapes[name])} and of {', '.join(DTYPES)}, got {describe(leaf)}"
            )
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ValueError(f"params to save must lie on devices of this process, but {name} does not; gather them")
    for entry in entries:
        entry_params = [leaves[".".join(path)] for path in entry.paths]
        tensor = _make_tensor(entry, entry_params, dtype, vocab_size)
        tensors |= quantized(tensor, entry) if in_fp8 else {entry.name: tensor}
    return tensors


def _make_tensor(entry: Entry, params: list[jax.Array], dtype: Dtype | None, vocab_size: int | None) -> Tensor:
    dtypes = {jnp.dtype(param.dtype).name for param in params}
    if dtype is None and len(dtypes) > 1:
        raise ValueError(f"the params of {entry.name} must have one dtype, got {', '.join(sorted(dtypes))}; give dtype")
    rows = vocab_size if entry.paths[0] in (("embedding",), ("head",)) else None
    shape = entry.shape if rows is None else (rows, *entry.shape[1:])
    dtype = np.float32 if entry.stays_float32 else dtype or params[0].dtype
    return Tensor(shape, jnp.dtype(dtype), lambda: entry.tensor_of(params)[:rows])


def _parts(tensors: Mapping[str, Tensor], largest: int) -> dict[str, dict[str, Tensor]]:
    """Files by their names, in the order of the tensors. A tensor larger than `largest` gets a file of its own."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size + tensor.nbytes > largest and parts[-1]:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    if len(parts) == 1:
        return {WHOLE: parts[0]}
    return {f"model-{i:05}-of-{len(parts):05}.safetensors": part for i, part in enumerate(parts, 1)}


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"a model must find room in a folder, got {error}; choose another one") from error
    others = sorted(file.name for file in folder.iterdir() if file.suffix == ".safetensors" or file.name == INDEX)
    if others:
        raise ValueError(f"{folder} must not have a model yet, got {others[0]}; choose another folder")

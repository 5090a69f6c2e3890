"""Adapters in the layout of PEFT, in and out: adapter_config.json and adapter_model.safetensors.

    base_model.model.<linear layer>.lora_A.weight    (rank, in)         the transpose of our lora_a
    base_model.model.<linear layer>.lora_B.weight    (features, rank)   the transpose of our lora_b

peft_layout.py says where a matrix has several of our layers, peft_config.py what the fields mean.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import unfreeze
from flax.typing import Dtype

from jax_fp8.core.checks import describe
from jax_fp8.core.files import shortened
from jax_fp8.core.lora import LORA_A, LORA_B, Lora
from jax_fp8.core.paths import LayerPath, at_path, put_at_path
from jax_fp8.core.types import PyTree
from jax_fp8.models.config import GPTConfig
from jax_fp8.models.huggingface.config_json import family_of, fits
from jax_fp8.models.huggingface.families import ARCHITECTURES
from jax_fp8.models.huggingface.json_files import read_object, write_object
from jax_fp8.models.huggingface.layouts import Entry
from jax_fp8.models.huggingface.peft_config import MOST_SETTINGS, SETTINGS, rank_of, read_adapter_config, scaling_of
from jax_fp8.models.huggingface.peft_layout import (
    block_diagonal,
    layers_of,
    linear_entries,
    module_of,
    side_by_side,
    split_pair,
    suffix_of,
    tensor_names,
)
from jax_fp8.models.huggingface.weights import SETTINGS as MODEL_SETTINGS
from jax_fp8.models.tensor_file import Tensor, map_arrays, write_arrays
from jax_fp8.nn.checks import check_dtype

TENSORS = "adapter_model.safetensors"
DTYPES = ("float32", "bfloat16", "float16")
ROUNDING = 1e-12  # of a quotient of two numbers in a file


def load_adapters(
    folder: str | os.PathLike,
    config: GPTConfig,
    params: Mapping | None = None,
    *,
    model_type: str | None = None,
) -> tuple[Lora, dict[str, PyTree]]:
    """Read adapters that PEFT or `save_adapters` has written.

    Args:
      folder: with adapter_config.json and adapter_model.safetensors.
      config: of the model that the adapters belong to, as `load_huggingface` returned it.
      params: of that model; the result then has them too. None: the result has the adapters alone.
      model_type: the family of the layout, as in `save_huggingface`; None: the first one that fits `config` and has
        the names of the tensors.

    Returns:
      The `Lora` for `GPT(config, lora=lora)`, and the params of that model. Adapters are NumPy arrays, (in, rank) and
      (rank, features), in the dtype of the file. `freeze_kernels(variables, recipe, params)` takes these params.

    Raises:
      ValueError: if the files are missing, or are not those of LoRA for linear layers of this model: each layer of one
        name must have an adapter or none, of one rank and alpha. Fields that would change the result otherwise are
        refused by name.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> config, lora = fp8.GPTConfig.preset("tiny-llama", num_layers=1), fp8.Lora(rank=4, targets=("query", "value"))
      >>> init = jax.jit(fp8.GPT(config, lora=lora).init)
      >>> fp8.save_adapters("adapters", config, init(jax.random.key(0), jnp.ones((1, 2), jnp.int32))["params"], lora)
      >>> loaded, params = fp8.load_adapters("adapters", config)
      >>> loaded, params["layer_0"]["attention"]["query"]["lora_a"].shape
      (Lora(rank=4, alpha=None, targets=('query', 'value')), (128, 4))
    """
    folder = Path(folder)
    _check_config(config)
    described = read_adapter_config(folder)
    if not os.path.isfile(folder / TENSORS):
        raise ValueError(f"{folder} must have {TENSORS}, got no such file; save the adapters as safetensors")
    tensors = map_arrays(folder / TENSORS)
    entries = _entries_of_file(config, model_type, tensors, folder)
    adapters: dict[LayerPath, tuple[np.ndarray, np.ndarray]] = {}
    scalings: set[float] = set()
    for entry in entries:
        names = tensor_names(entry)
        if any(name in tensors for name in names):
            first, second = (_matrix(tensors, name, entry, folder) for name in names)
            if len(first) != second.shape[1]:
                raise ValueError(
                    f"{names[1]} in {folder / TENSORS} must be of the rank of its lora_A, {len(first)}, got "
                    f"{second.shape[1]}; copy it again"
                )
            scalings.add(scaling_of(described, module_of(entry), len(first), folder))
            adapters |= split_pair(entry, first.T, second.T, rank_of(described, folder))
    lora = _lora_of(adapters, scalings, entries, folder)
    merged = {} if params is None else unfreeze(dict(params))
    for path, (a, b) in adapters.items():
        put_at_path(merged, path, {LORA_A: a, LORA_B: b})
    return lora, merged


def save_adapters(
    folder: str | os.PathLike,
    config: GPTConfig,
    params: PyTree,
    lora: Lora,
    *,
    base: str | None = None,
    dtype: Dtype | None = None,
    model_type: str | None = None,
) -> None:
    """Write adapters in the layout of PEFT, whose `PeftModel.from_pretrained` reads it.

    Args:
      folder: is created; must not have adapters yet.
      config: of the model, `GPT(config, lora=lora)`.
      params: of that model, on any devices of this process; all but the adapters are left out. They may be the params
        that `freeze_kernels` left.
      lora: the model's.
      base: the name or the folder of the model without adapters, for adapter_config.json.
      dtype: of the file; None keeps that of each array.
      model_type: the family of the layout; None: that of the folder `base`, or the first one that fits `config`.

    Raises:
      ValueError: if no layout fits the config, the params lack an adapter of `lora`, or the folder has adapters or
        cannot be written.

    Example:
      >>> import os
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> config, lora = fp8.GPTConfig.preset("tiny-llama", num_layers=1), fp8.Lora(rank=4, alpha=8)
      >>> init = jax.jit(fp8.GPT(config, lora=lora).init)
      >>> variables = init(jax.random.key(0), jnp.ones((1, 2), jnp.int32))
      >>> fp8.save_adapters("adapters", config, variables["params"], lora, base="models/tiny")
      >>> sorted(os.listdir("adapters"))
      ['adapter_config.json', 'adapter_model.safetensors']
    """
    if dtype is not None:
        check_dtype("dtype", dtype)
    if not isinstance(lora, Lora):
        raise ValueError(f"lora must be the Lora of the model, got {describe(lora)}; pass it")
    if base is not None and not isinstance(base, str):
        raise ValueError(f"base must be the name or the folder of a model, got {describe(base)}; pass a str")
    _check_config(config)
    linear = linear_entries(config, family_of(config, model_type or _type_of(base)))
    entries = [entry for entry in linear if any(map(lora.is_for, layers_of(entry)))]
    if not entries:
        layers = sorted({name for entry in linear for name in layers_of(entry)})
        raise ValueError(
            f"lora must have targets among the linear layers of this model, {', '.join(layers)}, got {lora.targets}; "
            "change them"
        )
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for entry in entries:
        pairs = _pairs(entry, params, lora)
        rank = sum(a.shape[1] for a, _ in pairs)
        if rank != lora.rank:
            ranks[suffix_of(entry)] = rank
        in_dtype = jnp.dtype(dtype or jnp.result_type(*(matrix for pair in pairs for matrix in pair)))
        shapes = (rank, entry.shapes[0][0]), (sum(shape[-1] for shape in entry.shapes), rank)
        for name, shape, join in zip(tensor_names(entry), shapes, (side_by_side, block_diagonal), strict=True):
            tensors[name] = Tensor(shape, in_dtype, lambda join=join, pairs=pairs: join(pairs).T)
    folder = _new_folder(folder)
    alpha = lora.rank if lora.alpha is None else lora.alpha
    write_arrays(folder / TENSORS, tensors, {"format": "pt"})
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": _plain(alpha),
        "rank_pattern": ranks,
        "alpha_pattern": {name: _plain(rank // lora.rank * alpha) for name, rank in ranks.items()},
        "target_modules": sorted({suffix_of(entry) for entry in entries}),
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": not entries[0].is_transposed,
        "inference_mode": True,
    }
    write_object(folder / SETTINGS, described)


# ---- names -----------------------------------------------------------------------------------------------------------


def _check_config(config: GPTConfig) -> None:
    if not isinstance(config, GPTConfig):
        raise ValueError(f"config must be a GPTConfig, got {describe(config)}; pass that of the model")


def _entries_of_file(
    config: GPTConfig, model_type: str | None, tensors: Mapping[str, np.ndarray], folder: Path
) -> list[Entry]:
    """The linear layers in the first layout that fits the config and has all names of a file."""
    unknown = "none"
    for family in ARCHITECTURES if model_type is None else (family_of(config, model_type),):
        if fits(config, family):
            entries = linear_entries(config, family)
            left = sorted(set(tensors).difference(*map(tensor_names, entries)))
            if tensors and not left:
                return entries
            unknown = shortened(left[0]) if left else "none"
    raise ValueError(
        f"{folder / TENSORS} must have adapters of linear layers of this model alone, got {unknown}; pass the config "
        "of the model that they were trained on"
    )


def _type_of(base: str | None) -> str | None:
    """The family of a model in a folder; None where `base` is only a name."""
    if base is None or not os.path.isfile(Path(base) / MODEL_SETTINGS):
        return None
    found = read_object(Path(base) / MODEL_SETTINGS, "it has the shape of the model", MOST_SETTINGS).get("model_type")
    return found if isinstance(found, str) else None


# ---- in --------------------------------------------------------------------------------------------------------------


def _matrix(tensors: Mapping[str, np.ndarray], name: str, entry: Entry, folder: Path) -> np.ndarray:
    """A matrix of an adapter, as the file has it."""
    tensor, is_first = tensors.get(name), name == tensor_names(entry)[0]
    size = entry.shapes[0][0] if is_first else sum(shape[-1] for shape in entry.shapes)
    if tensor is None or tensor.ndim != 2 or tensor.shape[is_first] != size or tensor.dtype.name not in DTYPES:
        shape = f"[rank, {size}]" if is_first else f"[{size}, rank]"
        arrived = "none" if tensor is None else f"{tensor.dtype.name}{list(tensor.shape)}"
        raise ValueError(
            f"{name} in {folder / TENSORS} must be a matrix {shape} of {', '.join(DTYPES)}, got {arrived}; take the "
            "adapters of this model"
        )
    return tensor


def _lora_of(
    adapters: Mapping[LayerPath, tuple[np.ndarray, np.ndarray]],
    scalings: set[float],
    entries: list[Entry],
    folder: Path,
) -> Lora:
    """The `Lora` of a model with these adapters."""
    ranks = {a.shape[1] for a, _ in adapters.values()}
    if len(ranks) > 1 or max(scalings) > min(scalings) * (1 + ROUNDING):
        raise ValueError(
            f"all adapters in {folder} must have one rank and one alpha / rank, got ranks {sorted(ranks)} and "
            f"{sorted(scalings)}; merge them into the model by PEFT instead"
        )
    paths = [path[:-1] for entry in entries for path in entry.paths]
    names = dict.fromkeys(path[-1] for path in paths if path in adapters)
    missing = [path for path in paths if path[-1] in names and path not in adapters]
    if missing:
        raise ValueError(
            f"all layers named {missing[0][-1]} must have an adapter in {folder}, but {'/'.join(missing[0])} has none; "
            "merge them into the model by PEFT instead"
        )
    rank, scaling = ranks.pop(), min(scalings)
    targets = None if len(adapters) == len(paths) else tuple(names)
    return Lora(rank=rank, alpha=None if scaling == 1 else _plain(rank * scaling), targets=targets)


# ---- out -------------------------------------------------------------------------------------------------------------


def _pairs(entry: Entry, params: PyTree, lora: Lora) -> list[tuple[jax.Array, jax.Array]]:
    """The adapters of the layers of one tensor; zeros where a layer has none and others have."""
    pairs = []
    for path, (rows, columns) in zip(entry.paths, entry.shapes, strict=True):
        if not lora.is_for(path[-2]):
            pairs.append((np.zeros((rows, lora.rank), jnp.bfloat16), np.zeros((lora.rank, columns), jnp.bfloat16)))
            continue
        a, b = (at_path(params, (*path[:-1], name)) for name in (LORA_A, LORA_B))
        shapes = (rows, lora.rank), (lora.rank, columns)
        if a is None or b is None or (jnp.shape(a), jnp.shape(b)) != shapes:
            raise ValueError(
                f"params must have an adapter of rank {lora.rank} at {'/'.join(path[:-1])}, of the shapes {shapes[0]} "
                f"and {shapes[1]}, got {describe(a)} and {describe(b)}; pass the params and the lora of one model"
            )
        pairs.append((a, b))
    return pairs


def _plain(number: float) -> float | int:
    """As an integer where it is one, for a file that people read."""
    return int(number) if float(number).is_integer() else float(number)


def _new_folder(folder: str | os.PathLike) -> Path:
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"adapters must find room in a folder, got {error}; choose another one") from error
    others = [name for name in (TENSORS, SETTINGS) if os.path.lexists(folder / name)]
    if others:
        raise ValueError(f"{folder} must not have adapters yet, got {others[0]}; choose another folder")
    return folder

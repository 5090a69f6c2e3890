"""`python -m jax_fp8 convert`: from a folder of Hugging Face to a file of params, and back.

convert --from huggingface FOLDER --to FILE      config.json and safetensors → params and the shape of their model
convert --from FILE --to huggingface FOLDER      and back
"""

import os
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from jax_fp8.core.types import PyTree
from jax_fp8.models.config import GPTConfig
from jax_fp8.models.huggingface.config_json import family_of
from jax_fp8.models.huggingface.weights import LARGEST_PART, load_huggingface, save_huggingface
from jax_fp8.models.params_file import load_config, map_params, save_params

HUGGINGFACE = "huggingface"
DTYPES = ("bfloat16", "float32", "float16")
WAYS = "--from huggingface FOLDER --to FILE", "--from FILE --to huggingface FOLDER"


def convert(
    source: list[str],
    target: list[str],
    dtype: str | None = None,
    vocab_size: int | None = None,
    part_gb: float = LARGEST_PART / 1e9,
) -> int:
    """Convert a model, and print its kind, size and progress. Returns the exit code.

    Args:
      source, target: one of them is a file, the other the word "huggingface" and a folder.
      dtype: of the result; None keeps the dtype of each array.
      vocab_size, part_gb: for a folder as target, see `save_huggingface`.
    """
    is_in, is_out = (len(side) == 2 and side[0] == HUGGINGFACE for side in (source, target))
    if is_in == is_out or len(target if is_in else source) != 1:
        raise ValueError(f"convert needs {', or '.join(WAYS)}; got --from {' '.join(source)} --to {' '.join(target)}")
    target_dtype = None if dtype is None else jnp.dtype(dtype)
    if is_in:
        if vocab_size is not None:
            raise ValueError(
                f"--vocab-size needs --to huggingface, whose vocabulary it cuts, got {vocab_size} without; leave it out"
            )
        config, params = load_huggingface(source[1])
        report = _progress(config, params, target_dtype)
        save_params(target[0], params, config, dtype=target_dtype, report=report)
    else:
        if not part_gb > 0:
            raise ValueError(f"--part-gb must be above 0, got {part_gb}")
        config, params = load_config(source[0]), map_params(source[0])
        save_huggingface(
            target[1],
            config,
            params,
            dtype=target_dtype,
            vocab_size=vocab_size,
            max_part_bytes=max(1, round(1e9 * part_gb)),
            report=_progress(config, params, target_dtype),
        )
    print(f"wrote {target[-1]}: {_size_of(Path(target[-1])) / 1e9:.2f} GB")
    return 0


def _progress(config: GPTConfig, params: PyTree, dtype: jnp.dtype | None) -> Callable[[int], None]:
    """Print the kind and size of a model. Returns a function that takes the bytes of each array, and prints every tenth
    of the way.
    """
    leaves = jax.tree.leaves(params)
    kinds = " and ".join(sorted({leaf.dtype.name for leaf in leaves}))
    into = "" if dtype is None else f", written in {dtype.name}"
    number, total = (
        sum(leaf.size for leaf in leaves),
        sum(leaf.size * (dtype or leaf.dtype).itemsize for leaf in leaves),
    )
    print(f"{family_of(config)}, {config.num_layers} layers, {number / 1e9:.2f}B params in {kinds}{into}", flush=True)
    written, tenths = 0, 0

    def report(size: int) -> None:
        nonlocal written, tenths
        written += size
        if 10 * written // total > tenths and written < total:
            tenths = 10 * written // total
            print(f"{written / 1e9:.1f} of {total / 1e9:.1f} GB", flush=True)

    return report


def _size_of(path: Path) -> int:
    files = [path] if path.is_file() else [Path(entry) for entry in os.scandir(path)]
    return sum(file.stat().st_size for file in files)

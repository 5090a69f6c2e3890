"""Write the params of a run's last checkpoint to a file with the model's config, and the tokenizer beside it.

    python -m jax_fp8 export mine --to mine.safetensors
    python -m jax_fp8 convert --from mine.safetensors --to huggingface mine-hf

`python -m jax_fp8 generate` reads such a file, and so do `fp8.load_config` and `fp8.load_params`.
"""

import dataclasses
import os
from pathlib import Path
from typing import Annotated

import jax.numpy as jnp
import tyro

from jax_fp8.core.types import PyTree
from jax_fp8.models.config import GPTConfig
from jax_fp8.models.huggingface.config_json import family_of
from jax_fp8.models.huggingface.weights import save_huggingface
from jax_fp8.models.params_file import save_params
from jax_fp8.report.run_format import TOKENIZER
from jax_fp8.run import command_line
from jax_fp8.run.encoders import Encoder
from jax_fp8.run.settings import Settings
from jax_fp8.run.tokenizer_files import check_no_other, write_tokenizer
from jax_fp8.run.trained import PARAMS, find, load_run, whole_params


@dataclasses.dataclass(frozen=True)
class Export:
    """Write the params of a run to a file."""

    run: Annotated[str, tyro.conf.Positional]
    """A run's folder, or the name of a run in --output."""
    to: Path
    """The file to write, NAME.safetensors."""
    output: Path = Path("runs")
    """The folder that has the run folders."""


def read_export(argv: list[str]) -> Export:
    return command_line.read(Export, argv, "export")


def export(wanted: Export) -> str:
    """Write the file, and return a sentence that says what was written."""
    if wanted.to.suffix != PARAMS:
        raise ValueError(f"--to must be a file with the ending {PARAMS}, got {wanted.to}")
    trained = load_run(find(wanted.run, wanted.output))
    tokenizer, folder = trained.encoder.files(), wanted.to.parent
    check_no_other(folder, tokenizer)
    save_params(wanted.to, whole_params(trained.model, trained.variables), trained.model.config)
    if not tokenizer:
        return f"{wanted.to} has {trained.origin}; its tokens are bytes"
    write_tokenizer(folder, tokenizer)
    return f"{wanted.to} has {trained.origin}, {folder / TOKENIZER} its tokenizer"


def check_can_export(settings: Settings, model: GPTConfig) -> None:
    """Raise before training unless the trained model can be written to --export."""
    folder = settings.export
    assert folder is not None
    if settings.num_processes not in (None, 1) or settings.distributed:
        raise ValueError(
            "--export writes params that one process has, got several processes; leave it out, and export the last "
            "checkpoint"
        )
    if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"--export must name a new or an empty folder, got {folder}; choose another")
    family_of(model)  # raises where no family has this shape


def write_huggingface(settings: Settings, model: GPTConfig, params: PyTree, encoder: Encoder) -> str:
    """Write the trained model to --export, and return a sentence that says so."""
    assert settings.export is not None
    dtype = jnp.dtype(settings.export_dtype) if settings.export_dtype else None
    save_huggingface(settings.export, model, params, dtype=dtype)
    names = write_tokenizer(settings.export, encoder.files(), is_for_transformers=True)
    tokenizer = f"with {', '.join(names)}" if names else "without a tokenizer: its tokens are bytes"
    return f"{settings.export} has the trained model for Hugging Face, {tokenizer}"


def main(argv: list[str]) -> int:
    try:
        print(export(read_export(argv)))
    except (ValueError, OSError) as error:
        return command_line.complain("export", error)
    return 0

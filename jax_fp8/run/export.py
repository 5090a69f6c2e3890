"""Write the params of a run's last checkpoint to a file with the model's config, and the tokenizer beside it.

    python -m jax_fp8 export mine --to mine.safetensors
    python -m jax_fp8 convert --from mine.safetensors --to huggingface mine-hf

`python -m jax_fp8 generate` reads such a file, and so do `fp8.load_config` and `fp8.load_params`.
"""

import dataclasses
import os
from pathlib import Path
from typing import Annotated

import tyro

from jax_fp8.core.files import Unreadable, read_text, write_text
from jax_fp8.models.params_file import save_params
from jax_fp8.report.run_format import TOKENIZER
from jax_fp8.run import command_line
from jax_fp8.run.generate import PARAMS, Request, find, load_run
from jax_fp8.run.text import PairEncoder


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
    trained = load_run(find(Request(run=wanted.run, output=wanted.output)))
    tokenizer_file = wanted.to.with_name(TOKENIZER)
    tokenizer = trained.encoder.text() if isinstance(trained.encoder, PairEncoder) else None
    check_no_other(tokenizer_file, tokenizer)
    save_params(wanted.to, trained.variables["params"], trained.model.config)
    if tokenizer is None:
        return f"{wanted.to} has {trained.origin}; its tokens are bytes"
    write_text(tokenizer_file, tokenizer)
    return f"{wanted.to} has {trained.origin}, {tokenizer_file} its tokenizer"


def check_no_other(tokenizer_file: Path, tokenizer: str | None) -> None:
    """Raise if the file exists and is another model's tokenizer: writing this model's would overwrite it; keeping it
    would give this model the wrong one.
    """
    if not os.path.lexists(tokenizer_file):
        return
    try:
        is_own = read_text(tokenizer_file) == tokenizer
    except Unreadable:
        is_own = False
    if not is_own:
        raise ValueError(
            f"--to must be in a folder without another model's {TOKENIZER}, got {tokenizer_file}; choose another"
        )


def main(argv: list[str]) -> int:
    try:
        print(export(read_export(argv)))
    except (ValueError, OSError) as error:
        return command_line.complain("export", error)
    return 0

"""Write the params of a run's last checkpoint to a file, with the shape of their model, and the tokenizer beside it.

    python examples/export.py mine --to mine.safetensors
    python -m jax_fp8 convert --from mine.safetensors --to huggingface mine-hf

`examples/generate.py` reads such a file, and so do `fp8.load_config` and `fp8.load_params`.
"""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Annotated

import command_line
import tyro
from generate import PARAMS, Wish, find, load_run
from record import TOKENIZER
from text import PairEncoder

import jax_fp8 as fp8
from jax_fp8.core.files import Unreadable, read_text, write_text
from jax_fp8.streams import one_line, surviving


@dataclasses.dataclass(frozen=True)
class Export:
    """What shall be written where."""

    run: Annotated[str, tyro.conf.Positional]
    """A run's folder, or its name among those of --output."""
    to: Path
    """The file, *.safetensors."""
    output: Path = Path("runs")
    """Where run folders are."""


def export(wish: Export) -> str:
    """Write it, and say what it is."""
    if wish.to.suffix != PARAMS:
        raise ValueError(f"--to must be a file with the ending {PARAMS}, got {wish.to}")
    trained = load_run(find(Wish(run=wish.run, output=wish.output)))
    beside = wish.to.with_name(TOKENIZER)
    tokenizer = trained.encoder.text() if isinstance(trained.encoder, PairEncoder) else None
    check_is_alone(beside, tokenizer)
    fp8.save_params(wish.to, trained.variables["params"], trained.model.config)
    if tokenizer is None:
        return f"{wish.to} has {trained.origin}; its tokens are bytes"
    write_text(beside, tokenizer)
    return f"{wish.to} has {trained.origin}, {beside} its tokenizer"


def check_is_alone(beside: Path, tokenizer: str | None) -> None:
    """Raise where a tokenizer of another model lies where that of this one belongs: one of them would be lost."""
    if not os.path.lexists(beside):
        return
    try:
        is_own = read_text(beside) == tokenizer
    except Unreadable:
        is_own = False
    if not is_own:
        raise ValueError(f"--to must be in a folder without another model's {TOKENIZER}, got {beside}; choose another")


def main(argv: list[str]) -> int:
    with surviving() as streams:
        return streams.status(_main(argv))


def _main(argv: list[str]) -> int:
    try:
        print(export(command_line.read(Export, argv, "Write the params of a run to a file.")))
    except (ValueError, OSError) as error:
        print(f"export.py: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

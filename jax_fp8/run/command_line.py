"""A command line → a dataclass, whose fields are the options. The parser's errors become a ValueError of one
sentence.
"""

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import TypeVar

import tyro

from jax_fp8.streams import one_line

REFUSED = 2  # exit status of a command that did not begin
Kind = TypeVar("Kind")


def read(kind: type[Kind], argv: list[str], command: str, default: Kind | None = None) -> Kind:
    """The options of `python -m jax_fp8 command`; the docstring of their class describes it in `--help`.

    Args:
      default: the values of options that the command line does not have; None takes those of the class.
    """
    start = tyro.MISSING_NONPROP if default is None else default
    with _in_one_sentence():
        return tyro.cli(kind, args=argv, prog=f"python -m jax_fp8 {command}", default=start)


def read_part(kind: type[Kind], argv: list[str]) -> Kind:
    """Only the options that `kind` has, from a command line that may have others."""
    with _in_one_sentence():
        return tyro.cli(kind, args=argv, return_unknown_args=True, add_help=False)[0]


def complain(command: str, sentence: object, status: int = REFUSED) -> int:
    """Print why a command ends, and return its exit status."""
    print(f"python -m jax_fp8 {command}: {one_line(sentence)}", file=sys.stderr)
    return status


@contextlib.contextmanager
def _in_one_sentence() -> Iterator[None]:
    """Turn the parser's framed text on stderr into the sentence of a ValueError."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            yield
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        lines = [line.strip("│╭╮╰╯|+ \n") for line in complaint.getvalue().splitlines()]
        body = [line for line in lines if not line.endswith(("─", "---"))]  # without the frame and its title
        end = next((index for index, line in enumerate(body) if line.startswith(("For full", "Argument help"))), None)
        raise ValueError(" ".join(" ".join(body[:end]).split()) + " (--help lists the options)") from None

"""A command line → a dataclass. Every complaint of the parser becomes a ValueError of one sentence."""

import contextlib
import io
import sys
from typing import Any, TypeVar

import tyro

from jax_fp8.streams import one_line

REFUSED = 2  # exit status of a command that did not begin
Kind = TypeVar("Kind")


def read(kind: type[Kind], argv: list[str], command: str, **others: Any) -> Kind:
    """The options of `python -m jax_fp8 command`; the docstring of their class describes it in `--help`."""
    return _in_one_sentence(tyro.cli, kind, args=argv, prog=f"python -m jax_fp8 {command}", **others)


def read_part(kind: type[Kind], argv: list[str]) -> Kind:
    """The fields of a dataclass, of a command line that has more."""
    return _in_one_sentence(tyro.cli, kind, args=argv, return_unknown_args=True, add_help=False)[0]


def complain(command: str, sentence: Any, status: int = REFUSED) -> int:
    print(f"python -m jax_fp8 {command}: {one_line(sentence)}", file=sys.stderr)
    return status


def _in_one_sentence(parse, *arguments, **keywords) -> Any:
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return parse(*arguments, **keywords)
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        lines = [line.strip("│╭╮╰╯|+ \n") for line in complaint.getvalue().splitlines()]
        body = [line for line in lines if not line.endswith(("─", "---"))]  # without the frame and its title
        end = next((index for index, line in enumerate(body) if line.startswith(("For full", "Argument help"))), None)
        raise ValueError(" ".join(" ".join(body[:end]).split()) + " (--help lists the options)") from None

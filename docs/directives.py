"""Directives of the site that show what the package says of itself.

.. command-help:: train     what `python -m jax_fp8 train --help` prints
.. presets::                the table of `GPTConfig.preset`
"""

import contextlib
import io
import os
from collections.abc import Iterator

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

import jax_fp8 as fp8
from jax_fp8 import cli
from jax_fp8.models.config import PRESETS

COLUMNS = "100"  # of help texts


class CommandHelp(Directive):
    """The help of one command, or of the program if no command is given."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        printed = command_help(*self.arguments)
        return [nodes.literal_block(printed, printed, language="text")]


def command_help(*command: str) -> str:
    """What `python -m jax_fp8 [command] --help` prints."""
    printed = io.StringIO()
    with _columns(), contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        cli.main([*command, "--help"])
    text = printed.getvalue().rstrip()
    if not text.startswith("usage: python -m jax_fp8"):
        raise ValueError(f"help of {command} must begin with its usage, got {text[:80]!r}; is there such a command?")
    return text


@contextlib.contextmanager
def _columns() -> Iterator[None]:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = COLUMNS
    try:
        yield
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before


class Presets(Directive):
    """One row for each preset: its sizes, and the parts that differ between models."""

    fields = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "vocab_size", "max_seq_len", "norm",
              "activation", "positions", "num_experts")  # fmt: skip

    def run(self) -> list[nodes.Node]:
        rows = [["preset", *self.fields]]
        for name in PRESETS:
            config = fp8.GPTConfig.preset(name)
            rows.append([name, *(str(getattr(config, field)) for field in self.fields)])
        return [_table(rows)]


def _table(rows: list[list[str]]) -> nodes.table:
    """A table whose first row is its heading."""
    table, group = nodes.table(), nodes.tgroup(cols=len(rows[0]))
    group += [nodes.colspec(colwidth=1) for _ in rows[0]]
    head, body = nodes.thead(), nodes.tbody()
    for part, lines in ((head, rows[:1]), (body, rows[1:])):
        for line in lines:
            row = nodes.row()
            for cell in line:
                entry = nodes.entry()
                entry += nodes.paragraph("", "", nodes.literal(cell, cell) if part is body else nodes.Text(cell))
                row += entry
            part += row
    group += [head, body]
    table += group
    return table


def setup(app: Sphinx) -> None:
    app.add_directive("command-help", CommandHelp)
    app.add_directive("presets", Presets)

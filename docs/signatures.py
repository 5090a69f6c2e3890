"""Signatures and docstrings as the reference shows them.

Signatures are as one would write them: defaults by their names, and no fields of Flax's own. Instead of
`dtype: str | type[Any] | ... = <class 'jax.numpy.bfloat16'>` there is `dtype=bfloat16`. A constant is documented by the
comment `#:` above it.

Docstrings are plain text, in which indented lines behind a colon are code. Sphinx wants two colons there.
"""

import dataclasses
import inspect
import re

import flax.linen as nn
from flax import nnx
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

import jax_fp8 as fp8
from jax_fp8.core.recipe import Recipe

OF_FLAX = ("parent", "name")  # fields that every module has
CONSTANTS = "jax_fp8.core.formats"  # the module that defines them


def process(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str, returned: str
) -> tuple[str, None] | None:
    """The signature of a dataclass or a Flax module, and no return type. Called by autodoc; None changes nothing."""
    if what != "class" or not isinstance(obj, type):
        return None
    if issubclass(obj, nnx.Module):
        _, *given = inspect.signature(obj.__init__).parameters.values()  # without `self`
    elif dataclasses.is_dataclass(obj):
        given = inspect.signature(obj).parameters.values()
    else:
        return None
    parameters = [
        parameter.replace(annotation=parameter.empty, default=Written.from_default(parameter.default))
        for parameter in given
        if not (issubclass(obj, nn.Module) and parameter.name in OF_FLAX)
    ]
    return str(inspect.Signature(parameters)), None


@dataclasses.dataclass(frozen=True)
class Written:
    """A default whose `repr` is how one writes it."""

    text: str

    @classmethod
    def from_default(cls, default: object) -> object:
        """The default as one writes it: by its public name, by the name of a dtype or function, or by its `repr`."""
        if default is inspect.Parameter.empty:
            return default
        public = (name for name in fp8.__all__ if getattr(fp8, name) is default)
        if name := next(public, None):
            return cls(name)
        if callable(default):  # a dtype, or a function, perhaps one that another function has made
            return cls(getattr(default, "__qualname__", repr(default)).replace(".<locals>.init", "()"))
        if repr(default) == "<factory>" or default == {}:
            return cls("{}")
        if isinstance(default, Recipe) and default == type(default)():
            return cls(f"{type(default).__name__}()")
        return cls(repr(default))

    def __repr__(self) -> str:
        return self.text


def document_constant(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Put the comment of a constant in the place of the docstring of its type. Called by autodoc."""
    if what == "data":
        lines[:] = ModuleAnalyzer.for_module(CONSTANTS).find_attr_docs()["", name.rpartition(".")[2]]


def mark_code(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Change the lines of a docstring as Sphinx wants them. Called by autodoc, before it reads Args and Returns."""
    for number, line in enumerate(lines[:-2]):
        indent = len(line) - len(line.lstrip())
        if line.endswith(":") and not lines[number + 1].strip() and lines[number + 2].startswith(" " * (indent + 4)):
            lines[number] = line + ":"
    lines[:] = [re.sub(r"(`[^`]+`)s\b", r"\1\\ s", line) for line in lines]  # a plural


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-signature", process)
    app.connect("autodoc-process-docstring", document_constant, priority=300)
    app.connect("autodoc-process-docstring", mark_code, priority=400)  # Napoleon's is 500

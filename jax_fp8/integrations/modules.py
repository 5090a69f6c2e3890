"""What adapters to trees of modules share: which layers a caller asks for, which others there are, and the host."""

import re
from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any

from jax.tree_util import KeyPath, keystr, tree_flatten_with_path

from jax_fp8.core.checks import describe
from jax_fp8.core.recipe import Recipe, check_recipe
from jax_fp8.core.types import PyTree

Where = str | Collection[str] | Callable[[str], bool] | None


def check_asked(function: str, recipe: Recipe, where: Where) -> None:
    """Raise unless these are a recipe, and a choice of layers."""
    check_recipe(recipe)
    if recipe is None:
        raise ValueError(f"{function} needs a recipe, got None; leave the model as it is")
    is_names = isinstance(where, Collection) and all(isinstance(name, str) for name in where)
    if not (where is None or is_names or callable(where)):
        raise ValueError(
            f"where must be a regular expression, last names of layers, or a function of a path, got {describe(where)}"
        )


def is_asked(where: Where, path: str) -> bool:
    """Whether the caller asks for the layer at this path."""
    if where is None or callable(where):
        return where is None or bool(where(path))
    return re.search(where, path) is not None if isinstance(where, str) else path.rsplit(".", 1)[-1] in where


def path_name(path: KeyPath) -> str:
    return keystr(path, simple=True, separator=".")


def others(model: PyTree, module: Any, linear: Any, stacked: Any = ()) -> dict[str, str]:
    """Modules beside linear layers that have weights of two dims or more, by path, with the reason why they are left.

    Args:
      module, linear, stacked: the types of modules, of linear layers, and of modules that stack others.
    """
    found: dict[str, str] = {}

    def visit(prefix: KeyPath, node: PyTree, blocks: int) -> None:
        if isinstance(node, linear):
            return
        nested = tree_flatten_with_path(node, is_leaf=lambda leaf: leaf is not node and isinstance(leaf, module))[0]
        for path, leaf in nested:
            if isinstance(leaf, module):
                visit((*prefix, *path), leaf, blocks + isinstance(node, stacked))
            elif getattr(leaf, "ndim", 0) - blocks > 1 and "Norm" not in type(node).__name__:
                found[path_name(prefix)] = f"{type(node).__name__} without FP8"

    visit((), model, 0)
    return found


def imported(name: str, host: str) -> Any:
    """A module of a host, which must be installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in (host, name.split(".")[0]):
            raise
        raise ImportError(f"this function needs {host}, which is not installed; pip install {host}") from error

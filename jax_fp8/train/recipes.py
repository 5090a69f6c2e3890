"""The recipe of a model and that of a step are two copies of one truth, compared where they meet: while a pass is
traced.

The layers cast by theirs. A step makes scales from amaxes by its own, and casts weights for several microbatches.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jax_fp8.core.recipe import Recipe
from jax_fp8.core.recorder import recipes_met


@contextmanager
def same_recipe(recipe: Recipe | None, asked: str = "make_train_step") -> Iterator[None]:
    """While a pass is traced: raise unless the layers of a loss have the recipe that a step, or a warm start, was told:
    all that have state, for their scales are made by it; of others at least one. A model may have bfloat16 layers, and
    a head that has another recipe without state.

    Args:
      asked: to whom `recipe` was given.
    """
    with recipes_met() as met:
        yield
    if recipe is not None:
        _check_recipes(met, recipe, asked)


def _check_recipes(met: Mapping[str, Recipe], recipe: Recipe, asked: str) -> None:
    wrong = {layer: of_layer for layer, of_layer in met.items() if of_layer != recipe}
    if recipe.has_state:
        wrong = {layer: of_layer for layer, of_layer in wrong.items() if of_layer.has_state}
    elif len(wrong) < len(met):
        return
    if wrong or (not met and not recipe.has_state):
        layer, of_layer = next(iter(wrong.items()), ("all of them", None))
        told, found = _in_short(recipe, of_layer), _in_short(of_layer, recipe)
        raise ValueError(
            f"the recipe of {asked} must be that of the model's layers, got {told} and, in {layer}, {found}; pass the "
            "same recipe to both"
        )


def _in_short(recipe: Any, other: Any) -> str:
    """A recipe by what the other one has not, if both are of one kind."""
    if type(recipe) is not type(other) or not dataclasses.is_dataclass(recipe):
        return repr(recipe) if recipe is None else f"{type(recipe).__name__}(...)"
    values = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    differing = [f"{name}={value!r}" for name, value in values.items() if value != getattr(other, name)]
    return f"{type(recipe).__name__}({', '.join(differing)})"

"""The check that a model and a step have the same recipe.

A user passes the recipe twice. Layers cast by the model's recipe; a step makes scales from amaxes by its own, and with
it casts weights that several microbatches share. So both are compared while a pass is traced: the layers report their
recipes then.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from jax_fp8.core.recipe import Recipe
from jax_fp8.core.recorder import recipes_met


@contextmanager
def same_recipe(recipe: Recipe | None, asked: str = "make_train_step") -> Iterator[None]:
    """Trace a pass in this context; raise unless the layers of its loss have this recipe.

    A recipe with state must be that of all layers with state, for the step makes their scales by it. A recipe without
    state must be that of one layer at least: a model may have a head with another recipe, and bfloat16 layers.

    Args:
      asked: the function that took `recipe`.
    """
    with recipes_met() as met:
        yield
    if recipe is not None:
        _check_recipes(met, recipe, asked)


def _check_recipes(met: Mapping[str, Recipe], recipe: Recipe, asked: str) -> None:
    others = {layer: other for layer, other in met.items() if other != recipe}
    if recipe.has_state:
        others = {layer: other for layer, other in others.items() if other.has_state}
    elif len(others) < len(met):
        return
    if others or (not met and not recipe.has_state):
        layer, other = next(iter(others.items()), ("all of them", None))
        raise ValueError(
            f"the recipe of {asked} must be that of the model's layers, got {_difference(recipe, other)} and, in "
            f"{layer}, {_difference(other, recipe)}; pass the same recipe to both"
        )


def _difference(recipe: Recipe | None, other: Recipe | None) -> str:
    """A recipe with the fields in which it differs from another of its class; of another class its name alone."""
    if recipe is None:
        return "None"
    if type(recipe) is not type(other) or not dataclasses.is_dataclass(recipe):
        return f"{type(recipe).__name__}(...)"
    values = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    differing = [f"{name}={value!r}" for name, value in values.items() if value != getattr(other, name)]
    return f"{type(recipe).__name__}({', '.join(differing)})"

"""Recipes by layer: a dict from regular expressions of paths to recipes, in the place of one recipe.

    {"(first|last)/.*": None, ".*/(gate|up|down)": BlockScaling(), ".*": DelayedScaling()}

The first expression counts that matches the whole path of a layer, its names joined by "/". A layer that none matches
stays in its own dtype, as with None. Layers ask here for their own recipe; a step has one recipe, `step_recipe`.
"""

import re
from collections.abc import Iterator, Mapping

from jax_fp8.core.checks import describe
from jax_fp8.core.paths import LayerPath
from jax_fp8.core.recipe import Recipe, check_recipe


class RecipeRules(Mapping):
    """Rules as a value that can be hashed, as a field of a module must be. Their order counts, also for equality: jax
    would sort the keys of a dict.
    """

    def __init__(self, rules: Mapping[str, Recipe | None]):
        check_rules(rules)
        self._pairs = tuple(rules.items())

    def __getitem__(self, pattern: str) -> Recipe | None:
        return dict(self._pairs)[pattern]

    def __iter__(self) -> Iterator[str]:
        return (pattern for pattern, _ in self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __hash__(self) -> int:
        return hash(self._pairs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RecipeRules) and self._pairs == other._pairs

    def __repr__(self) -> str:
        return repr(dict(self._pairs))


RecipeOrRules = Recipe | Mapping[str, Recipe | None] | None


def as_field(module: object) -> None:
    """Make rules in the field `recipe` of a module a value that can be hashed."""
    recipe = getattr(module, "recipe", None)
    if isinstance(recipe, Mapping) and not isinstance(recipe, RecipeRules):
        object.__setattr__(module, "recipe", RecipeRules(recipe))


def recipe_at(recipe: RecipeOrRules, path: LayerPath) -> Recipe | None:
    """The recipe of the layer at this path.

    Raises:
      ValueError: if `recipe` is neither a recipe, nor None, nor such rules.
    """
    if not isinstance(recipe, Mapping):
        check_recipe(recipe)
        return recipe
    check_rules(recipe)
    name = "/".join(path)
    return next((own for pattern, own in recipe.items() if re.fullmatch(pattern, name)), None)


def recipe_of_all(recipe: RecipeOrRules, path: LayerPath, names: tuple[str, ...]) -> Recipe | None:
    """The recipe of layers of these names at `path`, which share one GEMM.

    Raises:
      ValueError: as `recipe_at`; also if the layers have different ones.
    """
    found = [recipe_at(recipe, (*path, name)) for name in names]
    if any(own != found[0] for own in found):
        arrived = " and ".join(f"{own!r} for {name}" for name, own in zip(names, found, strict=True))
        raise ValueError(
            f"{'/'.join(path) or 'a layer'}: kernels that one GEMM multiplies by must have one recipe, got {arrived}; "
            f"write a rule that matches all of {', '.join(names)}"
        )
    return found[0]


def step_recipe(recipe: RecipeOrRules) -> Recipe | None:
    """The recipe of a step whose model has this recipe or these rules: the one with state, if there is one, otherwise
    the first.

    Raises:
      ValueError: as `recipe_at`; also if rules have several recipes with state, since a step makes scales by one.
    """
    if not isinstance(recipe, Mapping):
        check_recipe(recipe)
        return recipe
    check_rules(recipe)
    found = [own for own in recipe.values() if own is not None]
    with_state = [own for own in dict.fromkeys(found) if own.has_state]
    if len(with_state) > 1:
        raise ValueError(
            "rules may have one recipe with state, since a step makes all scales by it, got "
            f"{' and '.join(map(repr, with_state))}; give these layers one recipe, or recipes without state"
        )
    return (with_state or found or [None])[0]


def check_rules(rules: Mapping[str, Recipe | None]) -> None:
    """Raise unless these are expressions with recipes or None."""
    if not rules:
        raise ValueError("rules must have at least one expression, got an empty dict; pass None to leave all layers")
    for pattern, own in rules.items():
        try:
            if not isinstance(pattern, str):
                raise TypeError("an expression is a string")
            re.compile(pattern)
        except (TypeError, re.error) as error:
            raise ValueError(
                f"rules must have regular expressions of paths as keys, got {pattern!r} ({error}); pass strings such "
                'as ".*/mlp/.*"'
            ) from None
        if own is not None and not isinstance(own, Recipe):
            raise ValueError(
                "recipe must be a recipe such as DelayedScaling(...), None or rules that lead to these, got "
                f"{describe(rules)}, whose {pattern!r} leads to {describe(own)}; pass recipes"
            )

"""Which matrices with scales by tile can go to other devices in FP8.

    squares of a kernel      rows ─gather→ whole squares, and those of the transpose have the same scales
    lines of activations     rows ─gather→ whole lines, but the transpose has other scales, which no device knows

So `fsdp` and `pipe` gather a kernel in FP8 where each device has whole squares. Otherwise they gather it in its own
dtype, and the layer casts it. Sequence parallelism gathers activations, so recipes with tiles are refused there.
"""

from collections.abc import Iterable

import jax.numpy as jnp

from jax_fp8.core.cast import CastRule
from jax_fp8.core.formats import INPUT, KERNEL
from jax_fp8.core.recipe import Recipe


def has_whole_squares(recipe: Recipe, rows: int) -> bool:
    """Whether devices that have so many rows of a kernel can gather it in FP8: with one scale a tensor always."""
    rule = _rule_of(recipe, KERNEL)
    if rule.tile is None:
        return True
    down, across = rule.tile
    return rule.columnwise_tile == rule.tile and down == across and rows % down == 0


def check_sequence(recipes: Iterable[Recipe | None]) -> None:
    """Raise unless sequence parallelism can gather the inputs of GEMMs with these recipes."""
    for recipe in recipes:
        if recipe is not None and _rule_of(recipe, INPUT).tile is not None:
            raise ValueError(
                "sequence parallelism gathers activations in FP8, and needs recipes with one scale a tensor, got "
                f"{recipe!r}, with scales by tile; leave sequence_parallel out, or take another recipe"
            )


def _rule_of(recipe: Recipe, tensor: int) -> CastRule:
    return recipe.cast(tensor, None, lambda: jnp.float32(1)).rule

"""Recipes: how the scale of a tensor is found, and how its GEMMs accumulate. A recipe is a frozen value, safe to hash and to close over.

Delayed scaling predicts a tensor's scale from the amaxes of earlier steps, so that one pass over it both casts and measures.
Current scaling measures first and casts after: a second read, and no state.
"""

from dataclasses import dataclass

from jax_fp8.core.formats import HYBRID, Format

GEMMS = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True, kw_only=True)
class DelayedScaling:
    """Scale from the history of amaxes; the state is the Flax collection "fp8".

    Args:
      fp8_format: dtypes of the forward operands and of the output gradient.
      margin: powers of two of headroom: `scale = amax * 2**margin / fp8_max`.
      amax_history_len: steps remembered.
      amax_compute_algo: "max" over the history, or the "most_recent" amax.
      split_accumulator: GEMMs (of "fprop", "dgrad", "wgrad") that promote partial sums to float32; the others accumulate fast.
    """

    fp8_format: Format = HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    split_accumulator: tuple[str, ...] = ("dgrad", "wgrad")

    def __post_init__(self):
        _check_common(self)
        if self.amax_history_len < 1:
            raise ValueError(f"amax_history_len must be at least 1, got {self.amax_history_len}")
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(f'amax_compute_algo must be "max" or "most_recent", got {self.amax_compute_algo!r}')


@dataclass(frozen=True, kw_only=True)
class CurrentScaling:
    """Scale from the tensor at hand; no state.

    Args:
      fp8_format: dtypes of the forward operands and of the output gradient.
      power_2_scale: round the multiplier `1 / scale` down to a power of two.
      amax_epsilon: smallest amax a scale is computed from.
      split_accumulator: as in `DelayedScaling`.
    """

    fp8_format: Format = HYBRID
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    split_accumulator: tuple[str, ...] = ("dgrad", "wgrad")

    def __post_init__(self):
        _check_common(self)
        if not self.amax_epsilon >= 0:
            raise ValueError(f"amax_epsilon must be a number that is not negative, got {self.amax_epsilon}")


Recipe = DelayedScaling | CurrentScaling


def check_recipe(recipe) -> None:
    """Raise unless `recipe` is a recipe or None (plain bfloat16)."""
    if recipe is not None and not isinstance(recipe, Recipe):
        raise ValueError(f"recipe must be DelayedScaling(...), CurrentScaling(...) or None, got {recipe!r}")


def _check_common(recipe):
    if not isinstance(recipe.fp8_format, Format):
        raise ValueError(f"fp8_format must be a Format, got {recipe.fp8_format!r}; pass jax_fp8.HYBRID")
    names = recipe.split_accumulator
    if not isinstance(names, tuple) or not set(names) <= set(GEMMS):
        raise ValueError(f"split_accumulator must be a tuple of names out of {GEMMS}, got {names!r}")

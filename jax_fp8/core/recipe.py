"""Recipes: how the tensors of a GEMM are cast, and how its products accumulate.
A recipe is a frozen value, safe to hash and to close over.

Delayed scaling predicts a tensor's scale from the amaxes of earlier steps, so that one pass over it both casts and
measures. Current scaling measures first and casts after: a second read, and no state. Block scaling has a scale for
every 128 elements along the contracting dim: one pass, no state, and an outlier costs precision only in its own tile.

Any object with the members of `Recipe` is a recipe. Other rooms never ask which recipe it is: they ask whether it has
state, and how it casts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax

from jax_fp8.core.cast import LINE, SQUARE, Cast
from jax_fp8.core.checks import check_bool, check_integer, check_number, describe
from jax_fp8.core.formats import E4M3, HYBRID, KERNEL, OUTPUT_GRADIENT, Format
from jax_fp8.core.scale import ScaleFormula

GEMMS = ("fprop", "dgrad", "wgrad")
MOST_MARGIN = 126  # up to here, 2**margin and 2**-margin are normal float32 numbers


@runtime_checkable
class Recipe(Protocol):
    """The members that a recipe must have."""

    @property
    def fp8_format(self) -> Format: ...

    @property
    def split_accumulator(self) -> tuple[str, ...]:
        """GEMMs (of "fprop", "dgrad", "wgrad") that promote partial sums to float32; the others accumulate fast."""
        ...

    @property
    def has_state(self) -> bool:
        """Whether its scales come from a history of amaxes, the Flax collection "fp8", as those of `DelayedScaling`
        alone do.
        """
        ...

    def cast(self, tensor: int, scales: jax.Array | None, measure: Callable[[], jax.Array]) -> Cast:
        """How one tensor of a GEMM is cast.

        Args:
          tensor: INPUT, KERNEL or OUTPUT_GRADIENT.
          scales: f32[3] of the GEMM's state; None where there is no state, or no history in it yet.
          measure: finds the tensor's amax f32[], in a pass of its own.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class DelayedScaling:
    """Scale each tensor by the amaxes of earlier steps; the state is the Flax collection "fp8".

    `scale = amax * 2**margin / fp8_max`, where `amax` comes from the history. The formula and its defaults are those of
    Transformer Engine (https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/common.html).

    Args:
      fp8_format: dtypes of the forward operands and of the output gradient.
      margin: powers of two of headroom, from -126 to 126.
      amax_history_len: steps remembered.
      amax_compute_algo: "max" over the history, or the "most_recent" amax.
      forget_outliers: ignore amaxes of the history that are so much larger than the newest one that, with their scale,
        the newest tensor would fall below the smallest normal number: 2.9e4 times for E4M3, 9.4e8 times for E5M2.
        Without it, one batch with values of 1e30 leaves a layer without input for as many steps as the history is long.
      split_accumulator: GEMMs (of "fprop", "dgrad", "wgrad") that promote partial sums to float32;
        the others accumulate fast.

    Raises:
      ValueError: if a field has another type, or a value that is not listed here.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> recipe = fp8.DelayedScaling(amax_history_len=16)
      >>> variables = fp8.Dense(32, recipe=recipe).init(jax.random.key(0), jnp.ones((2, 16)))
      >>> jax.tree.map(jnp.shape, variables["fp8"])
      {'amax_history': (3, 16), 'scale': (3,)}
    """

    fp8_format: Format = HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    forget_outliers: bool = False
    split_accumulator: tuple[str, ...] = ("dgrad", "wgrad")

    @property
    def has_state(self) -> bool:
        return True

    def cast(self, tensor: int, scales: jax.Array | None, measure: Callable[[], jax.Array]) -> Cast:
        """With the scale of the state; without `scales`, as in the warm start, with the scale of the tensor's amax."""
        dtype = self.fp8_format.dtype_of(tensor)
        if scales is None:
            return Cast.from_amax(dtype, measure(), ScaleFormula(margin=self.margin))
        return Cast.with_row(dtype, scales, tensor)

    def __post_init__(self):
        _check_common(self)
        check_integer("margin", self.margin, -MOST_MARGIN, MOST_MARGIN)
        check_integer("amax_history_len", self.amax_history_len)
        check_bool("forget_outliers", self.forget_outliers)
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(f'amax_compute_algo must be "max" or "most_recent", got {self.amax_compute_algo!r}')


@dataclass(frozen=True, kw_only=True)
class CurrentScaling:
    """Scale each tensor by its own amax; there is no state.

    `scale = amax / fp8_max`, after a pass over the tensor that finds its amax.

    Args:
      fp8_format: dtypes of the forward operands and of the output gradient.
      power_2_scale: round the multiplier `1 / scale` down to a power of two.
      amax_epsilon: smallest amax a scale is computed from, in units of the tensor.
      split_accumulator: as in `DelayedScaling`.

    Raises:
      ValueError: if a field has another type, `amax_epsilon` is negative, or `split_accumulator` names another GEMM.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> layer = fp8.Dense(32, recipe=fp8.CurrentScaling())
      >>> [*layer.init(jax.random.key(0), jnp.ones((2, 16)))]
      ['params']
    """

    fp8_format: Format = HYBRID
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    split_accumulator: tuple[str, ...] = ("dgrad", "wgrad")

    @property
    def has_state(self) -> bool:
        return False

    def cast(self, tensor: int, scales: jax.Array | None, measure: Callable[[], jax.Array]) -> Cast:
        """With the scale of the tensor's own amax."""
        formula = ScaleFormula(amax_epsilon=self.amax_epsilon, power_2_scale=self.power_2_scale)
        return Cast.from_amax(self.fp8_format.dtype_of(tensor), measure(), formula)

    def __post_init__(self):
        _check_common(self)
        check_bool("power_2_scale", self.power_2_scale)
        check_number("amax_epsilon", self.amax_epsilon, "that is not negative", lambda epsilon: epsilon >= 0)


@dataclass(frozen=True, kw_only=True)
class BlockScaling:
    """Scale each tile of a tensor by its own amax, as DeepSeek-V3 does; there is no state.

    Tiles of inputs and output gradients are 1 x 128, along the dim that a GEMM contracts; tiles of kernels are
    128 x 128. All values are E4M3. GEMMs multiply each sum of 128 products by both scales, and add up in float32
    (https://arxiv.org/abs/2412.19437, section 3.3).

    Args:
      power_2_scale: round the multiplier `1 / scale` down to a power of two.
      amax_epsilon: smallest amax a scale is computed from, in units of the tensor.
      wgrad: tiles of the output gradient in the weight gradient: "1d2d" is 128 x 128, with which the GEMM is faster;
        "1d1d" is 1 x 128 along the tokens. Tiles of the input are 1 x 128 in both.
      split_accumulator: always all three GEMMs: each sum of 128 products leaves the tensor cores.

    Raises:
      ValueError: if a field has another type, `amax_epsilon` is negative, `wgrad` has another value, or
        `split_accumulator` leaves a GEMM out.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> layer = fp8.Dense(128, recipe=fp8.BlockScaling())
      >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 256)))
      >>> layer.apply(variables, jnp.ones((2, 256))).shape
      (2, 128)
    """

    power_2_scale: bool = True
    amax_epsilon: float = 0.0
    wgrad: str = "1d2d"
    split_accumulator: tuple[str, ...] = GEMMS

    @property
    def fp8_format(self) -> Format:
        """E4M3 everywhere: a scale need only cover the range of one tile."""
        return Format(forward=E4M3, backward=E4M3)

    @property
    def has_state(self) -> bool:
        return False

    def cast(self, tensor: int, scales: jax.Array | None, measure: Callable[[], jax.Array]) -> Cast:
        """With the scales of the tensor's own tiles."""
        formula = ScaleFormula(amax_epsilon=self.amax_epsilon, power_2_scale=self.power_2_scale)
        if tensor == KERNEL:
            return Cast.by_tile(E4M3, SQUARE, formula)
        is_coarse = tensor == OUTPUT_GRADIENT and self.wgrad == "1d2d"
        return Cast.by_tile(E4M3, LINE, formula, SQUARE if is_coarse else LINE)

    def __post_init__(self):
        check_bool("power_2_scale", self.power_2_scale)
        check_number("amax_epsilon", self.amax_epsilon, "that is not negative", lambda epsilon: epsilon >= 0)
        if self.wgrad not in ("1d2d", "1d1d"):
            raise ValueError(f'wgrad must be "1d2d" or "1d1d", got {self.wgrad!r}')
        if self.split_accumulator != GEMMS:
            raise ValueError(
                f"split_accumulator of BlockScaling must be {GEMMS}, got {self.split_accumulator!r}: by tile no GEMM "
                "accumulates fast; leave it out"
            )


def accumulation(recipe: Recipe, gemm: str) -> str:
    """How one of "fprop", "dgrad" and "wgrad" accumulates, as `matmul` takes it."""
    return "split" if gemm in recipe.split_accumulator else "fast"


def check_recipe(recipe: object) -> None:
    """Raise unless `recipe` is a recipe or None (plain bfloat16)."""
    if recipe is not None and (isinstance(recipe, type) or not isinstance(recipe, Recipe)):
        arrived = repr(recipe) if isinstance(recipe, str | type | int | float) else describe(recipe)
        raise ValueError(
            f"recipe must be DelayedScaling(...), CurrentScaling(...), BlockScaling(...) or None, got {arrived}"
        )


def _check_common(recipe: DelayedScaling | CurrentScaling) -> None:
    if not isinstance(recipe.fp8_format, Format):
        raise ValueError(f"fp8_format must be a Format, got {recipe.fp8_format!r}; pass jax_fp8.HYBRID")
    names = recipe.split_accumulator
    if not isinstance(names, tuple) or any(name not in GEMMS for name in names):
        raise ValueError(f"split_accumulator must be a tuple of names out of {GEMMS}, got {names!r}")

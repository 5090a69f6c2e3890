"""The end of an optimizer step for the state of delayed scaling:
the amaxes of the step become the scales of the next one.

    staged = max(history[0], recorded)
    where 0 < staged < ∞:  scale = amax * 2**margin / fp8_max        history = 0, history[2:], staged
    elsewhere:             scale and history stay as they were before anything was staged: history[0] = 0

`amax` is the largest of the history or, with "most_recent", what was staged. With `forget_outliers` what is so large
that the staged amax would fall below the smallest normal number of its dtype is none of the history. What the backward
passes of a step recorded may come beside the state, f32[rows], and is then never written into it: that would be a
kernel for each GEMM, once a microbatch.

One launch serves all rows of a collection, in place: XLA copies a history first only where it is still needed. State is
the same on all devices, and what someone has split is gathered: a row of a shard would be another row.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.formats import OUTPUT_GRADIENT, fp8_max, smallest_normal
from jax_fp8.core.recipe import DelayedScaling, Recipe
from jax_fp8.core.recipe_rules import RecipeOrRules, step_recipe
from jax_fp8.core.scale import scale_from_amax
from jax_fp8.core.state import check_dtypes, gemm_states, join_amaxes, map_gemms, stage
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.dispatch import Split, dispatch, gathered

TARGET = "jax_fp8_update_state"


def update_rows(
    scale: jax.Array, history: jax.Array, recipe: DelayedScaling
) -> tuple[jax.Array, jax.Array]:  # f32[rows], f32[rows, L]
    """The reference: new scales and histories from staged ones.

    Rows are those of GEMMs one after the other, three of each.
    """
    staged = history[:, 0]
    ran = (staged > 0) & jnp.isfinite(staged)
    amaxes = history
    if recipe.forget_outliers:
        limit = staged * _of_rows(recipe, staged.size, lambda dtype: fp8_max(dtype) / smallest_normal(dtype))
        limit = limit * np.float32(2.0**-recipe.margin)
        amaxes = jnp.where(history > limit[:, None], staged[:, None], history)
    amax = jnp.max(amaxes, axis=-1) if recipe.amax_compute_algo == "max" else staged
    new_scale = _of_rows(recipe, amax.size, lambda dtype: scale_from_amax(amax, dtype, recipe.margin))
    unstaged = history.at[:, 0].set(0)
    rolled = jnp.roll(history, -1, axis=-1).at[:, 0].set(0)
    return jnp.where(ran, new_scale, scale), jnp.where(ran[:, None], rolled, unstaged)


def _of_rows(
    recipe: DelayedScaling, rows: int, of_dtype: Callable[[jax.typing.DTypeLike], jax.typing.ArrayLike]
) -> jax.Array:
    """`of_dtype(dtype)` by the dtype of each row's tensor."""
    is_gradient = jnp.arange(rows) % 3 == OUTPUT_GRADIENT
    return jnp.where(is_gradient, of_dtype(recipe.fp8_format.backward), of_dtype(recipe.fp8_format.forward))


def count_rows(staged: jax.Array, scale: jax.Array, recipe: DelayedScaling) -> jax.Array:
    """Of the staged amaxes f32[rows], int32[2]: how many are infinite or NaN, and how many, at the scale f32[rows] with
    which their tensor was cast, lie below the smallest normal number of its dtype: of such a tensor little is left.
    """
    smallest = scale * _of_rows(recipe, scale.size, smallest_normal)
    counted = ~jnp.isfinite(staged), (staged > 0) & (staged < smallest)
    return jnp.stack([jnp.sum(rows, dtype=jnp.int32) for rows in counted])


def update_state(fp8_state: Mapping, recipe: RecipeOrRules) -> dict:
    """Finish an optimizer step: turn staged amaxes into the scales of the next one.

    Where the staged amax is 0 (not run) or not finite, the row stays exactly as it was before staging: same scale, same
    history. Otherwise the scale follows from the history by the recipe, the history rolls by one,
    and slot 0 is cleared.

    Args:
      fp8_state: the collection "fp8", of `scale` f32[..., 3] and `amax_history` f32[..., 3, L] for each GEMM; or {}
        for a recipe without state.
      recipe: the recipe, or the rules, the collection was made for.

    Returns:
      A collection of the same structure, shapes and dtypes.

    Raises:
      ValueError: if `recipe` is not a recipe, or the histories were made for another one; or if a leaf is not float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> recipe = fp8.DelayedScaling(amax_history_len=2)
      >>> staged = {"scale": jnp.ones(3), "amax_history": jnp.array([[448.0, 0], [896, 0], [57344, 0]])}
      >>> new = fp8.update_state({"layer": staged}, recipe)
      >>> new["layer"]["scale"]
      Array([1., 2., 1.], dtype=float32)
    """
    return finish_step(fp8_state, None, recipe)[0]


def count_amaxes(fp8_state: Mapping, recipe: RecipeOrRules) -> dict[str, jax.Array]:
    """Count the tensors of a step whose amax is not finite, or too small for their scale.

    Your own training loop calls it before `update_state`; `make_train_step` counts by itself.

    Args:
      fp8_state: the collection "fp8" with the amaxes of a step staged, as `value_and_grad` returns it; or {}.
      recipe: the recipe, or the rules, the collection was made for.

    Returns:
      Two counts of tensors, int32[]. "nonfinite_amaxes" have an infinity or a NaN. "underflowing_amaxes" are so small
      at their scale that little more than zeros was left of them.

    Raises:
      ValueError: if `recipe` is no recipe, the histories were made for another one, or a leaf is not float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> recipe = fp8.DelayedScaling(amax_history_len=2)
      >>> staged = {"scale": jnp.ones(3), "amax_history": jnp.array([[jnp.inf, 0], [1e-3, 0], [1, 0]])}
      >>> counts = fp8.count_amaxes({"layer": staged}, recipe)
      >>> {name: int(count) for name, count in counts.items()}
      {'nonfinite_amaxes': 1, 'underflowing_amaxes': 1}
    """
    recipe = step_recipe(recipe)
    gemms = gemm_states(fp8_state)
    if not gemms:
        return as_metrics(jnp.zeros(2, jnp.int32))
    staged = jnp.concatenate([gemm["amax_history"][..., 0].reshape(-1) for gemm in gemms])
    return as_metrics(count_joined(fp8_state, staged, recipe))


def count_joined(fp8_state: Mapping, amaxes: jax.Array, recipe: Recipe | None) -> jax.Array:
    """`count_rows` of a collection and of the amaxes f32[rows] of a step, int32[2]."""
    gemms = gemm_states(fp8_state)
    _check(fp8_state, gemms, recipe)
    scale = join_amaxes([gemm["scale"] for gemm in gemms])
    return count_rows(amaxes, scale, recipe)  # type: ignore[arg-type] - _check knows that it has state


def as_metrics(counts: jax.Array) -> dict[str, jax.Array]:
    """The names of what `count_rows` counts."""
    return {"nonfinite_amaxes": counts[0], "underflowing_amaxes": counts[1]}


def finish_step(fp8_state: Mapping, amaxes: jax.Array | None, recipe: RecipeOrRules) -> tuple[dict, jax.Array]:
    """`update_state` of a state in which these amaxes f32[rows] are yet to be staged, and `count_rows`, int32[2]."""
    recipe = step_recipe(recipe)
    gemms = gemm_states(fp8_state)
    if not gemms:
        return {}, jnp.zeros(2, jnp.int32)
    _check(fp8_state, gemms, recipe)
    recorded = np.zeros(sum(gemm["scale"].size for gemm in gemms), np.float32) if amaxes is None else amaxes
    counts, *updated = _update(recorded, *_leaves(gemms), recipe=recipe)
    remaining = iter(updated)
    state = map_gemms(lambda _: {"scale": next(remaining), "amax_history": next(remaining)}, fp8_state)
    return state, counts


def _check(fp8_state: Mapping, gemms: Sequence[Mapping], recipe: PyTree) -> None:
    check_dtypes(fp8_state)
    if recipe is None or not recipe.has_state:
        raise ValueError(
            f"a collection with amax histories needs the DelayedScaling recipe it was made for, got recipe={recipe!r}"
        )
    lengths = {gemm["amax_history"].shape[-1] for gemm in gemms}
    if lengths != {recipe.amax_history_len}:
        raise ValueError(
            f"every amax_history must have the recipe's amax_history_len={recipe.amax_history_len}, "
            f"got lengths {sorted(lengths)}; pass the recipe that the model was made with"
        )


def _leaves(gemms: Sequence[Mapping]) -> list[jax.Array]:
    """Scale and history of each GEMM, one after the other."""
    return [jnp.asarray(gemm[name]) for gemm in gemms for name in ("scale", "amax_history")]


@partial(jax.jit, static_argnames="recipe")  # so that a loop that does not jit its update compiles it once
def _update(recorded: jax.Array, *leaves: jax.Array, recipe: DelayedScaling):
    operands, results = ([_dims(side, i, x) for i, x in enumerate((recorded, *leaves))] for side in "xy")
    rule = f"{','.join(operands)} -> {','.join(['counts', *results[1:]])}"
    return dispatch(rule, partial(_kernel, recipe), partial(_reference, recipe), recorded, *leaves)


def _dims(side: str, number: int, array: jax.Array) -> str:
    """No dim of an operand is one of a result: however operands are split, results are not."""
    return " ".join(f"{side}{number}d{dim}" for dim in range(array.ndim))


def _whole(arrays: Sequence[jax.Array], split: Split) -> list[jax.Array]:
    return [gathered(array, split, *_dims("x", number, array).split()) for number, array in enumerate(arrays)]


def _kernel(recipe: DelayedScaling, *arrays: jax.Array, split: Split):
    whole = _whole(arrays, split)
    leaves = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in whole[1:]]
    aliases = {number: number for number in range(1, len(whole))}
    call = jax.ffi.ffi_call(TARGET, [jax.ShapeDtypeStruct((2,), jnp.int32), *leaves], input_output_aliases=aliases)
    return tuple(
        call(
            *whole,
            forward=jnp.dtype(recipe.fp8_format.forward).name,
            backward=jnp.dtype(recipe.fp8_format.backward).name,
            margin=np.int32(recipe.margin),
            most_recent=recipe.amax_compute_algo == "most_recent",
            forget_outliers=recipe.forget_outliers,
        )
    )


def _reference(recipe: DelayedScaling, *arrays: jax.Array, split: Split):
    recorded, *leaves = _whole(arrays, split)
    scale = jnp.concatenate([leaf.reshape(-1) for leaf in leaves[::2]])
    history = jnp.concatenate([leaf.reshape(-1, leaf.shape[-1]) for leaf in leaves[1::2]])
    history = stage(history, recorded)
    updated = update_rows(scale, history, recipe)
    ends = np.cumsum([leaf.size for leaf in leaves[::2]])[:-1]
    pieces = [piece for pair in zip(*(jnp.split(rows, ends) for rows in updated), strict=True) for piece in pair]
    reshaped = (piece.reshape(leaf.shape) for piece, leaf in zip(pieces, leaves, strict=True))
    return count_rows(history[:, 0], scale, recipe), *reshaped

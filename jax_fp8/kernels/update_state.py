"""The end of an optimizer step for the state of delayed scaling:
the amaxes of the step become the scales of the next one.

    staged = max(history[0], recorded)
    where 0 < staged < ∞:  scale = amax * 2**margin / fp8_max        history = 0, history[2:], staged
    elsewhere:             scale and history stay as they were before anything was staged: history[0] = 0

`amax` is the largest of the history or, with "most_recent", what was staged. What the backward passes of a step
recorded may come beside the state, f32[rows], and is then never written into it:
that would be a kernel for each GEMM, once a microbatch.

One launch serves all rows of a collection, in place: XLA copies a history first only where it is still needed. State is
the same on all devices, and what someone has split is gathered: a row of a shard would be another row.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.formats import OUTPUT_GRADIENT
from jax_fp8.core.recipe import DelayedScaling, Recipe, check_recipe
from jax_fp8.core.scale import scale_from_amax
from jax_fp8.core.state import gemm_states, map_gemms, stage
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
    amax = jnp.max(history, axis=-1) if recipe.amax_compute_algo == "max" else staged
    forward, backward = (
        scale_from_amax(amax, dtype, recipe.margin) for dtype in (recipe.fp8_format.forward, recipe.fp8_format.backward)
    )
    new_scale = jnp.where(jnp.arange(amax.size) % 3 == OUTPUT_GRADIENT, backward, forward)
    unstaged = history.at[:, 0].set(0)
    rolled = jnp.roll(history, -1, axis=-1).at[:, 0].set(0)
    return jnp.where(ran, new_scale, scale), jnp.where(ran[:, None], rolled, unstaged)


def count_nonfinite(staged: jax.Array) -> jax.Array:
    """How many staged amaxes are infinite or NaN, int32[]."""
    return jnp.sum(~jnp.isfinite(staged), dtype=jnp.int32)


def update_state(fp8_state: Mapping, recipe: Recipe | None) -> dict:
    """Finish an optimizer step: turn staged amaxes into the scales of the next one.

    Where the staged amax is 0 (not run) or not finite, the row stays exactly as it was before staging: same scale, same
    history. Otherwise the scale follows from the history by the recipe, the history rolls by one,
    and slot 0 is cleared.

    Args:
      fp8_state: the collection "fp8", or {} for a recipe without state.
      recipe: the recipe the collection was made for.

    Returns:
      A collection of the same structure.
    """
    return finish_step(fp8_state, None, recipe)[0]


def finish_step(fp8_state: Mapping, amaxes: jax.Array | None, recipe: Recipe | None) -> tuple[dict, jax.Array]:
    """`update_state` of a state in which these amaxes f32[rows] are yet to be staged,
    and how many staged ones were infinite or NaN, int32[].
    """
    check_recipe(recipe)
    gemms = gemm_states(fp8_state)
    if not gemms:
        return {}, jnp.int32(0)
    _check(gemms, recipe)
    recorded = np.zeros(sum(gemm["scale"].size for gemm in gemms), np.float32) if amaxes is None else amaxes
    nonfinite, *updated = _update(recorded, *_leaves(gemms), recipe=recipe)
    remaining = iter(updated)
    state = map_gemms(lambda _: {"scale": next(remaining), "amax_history": next(remaining)}, fp8_state)
    return state, nonfinite


def _check(gemms, recipe):
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


def _leaves(gemms) -> list[jax.Array]:
    """Scale and history of each GEMM, one after the other."""
    return [jnp.asarray(gemm[name]) for gemm in gemms for name in ("scale", "amax_history")]


@partial(jax.jit, static_argnames="recipe")  # so that a loop that does not jit its update compiles it once
def _update(recorded, *leaves, recipe):
    operands, results = ([_dims(side, i, x) for i, x in enumerate((recorded, *leaves))] for side in "xy")
    rule = f"{','.join(operands)} -> {','.join(['', *results[1:]])}"
    return dispatch(rule, partial(_kernel, recipe), partial(_reference, recipe), recorded, *leaves)


def _dims(side, number, array) -> str:
    """No dim of an operand is one of a result: however operands are split, results are not."""
    return " ".join(f"{side}{number}d{dim}" for dim in range(array.ndim))


def _whole(arrays: Sequence[jax.Array], split: Split) -> list[jax.Array]:
    return [gathered(array, split, *_dims("x", number, array).split()) for number, array in enumerate(arrays)]


def _kernel(recipe, *arrays, split: Split):
    arrays = _whole(arrays, split)
    leaves = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays[1:]]
    aliases = {number: number for number in range(1, len(arrays))}
    call = jax.ffi.ffi_call(TARGET, [jax.ShapeDtypeStruct((), jnp.int32), *leaves], input_output_aliases=aliases)
    return tuple(
        call(
            *arrays,
            forward=jnp.dtype(recipe.fp8_format.forward).name,
            backward=jnp.dtype(recipe.fp8_format.backward).name,
            margin=np.int32(recipe.margin),
            most_recent=recipe.amax_compute_algo == "most_recent",
        )
    )


def _reference(recipe, *arrays, split: Split):
    recorded, *leaves = _whole(arrays, split)
    scale = jnp.concatenate([leaf.reshape(-1) for leaf in leaves[::2]])
    history = jnp.concatenate([leaf.reshape(-1, leaf.shape[-1]) for leaf in leaves[1::2]])
    history = stage(history, recorded)
    updated = update_rows(scale, history, recipe)
    ends = np.cumsum([leaf.size for leaf in leaves[::2]])[:-1]
    pieces = [piece for pair in zip(*(jnp.split(rows, ends) for rows in updated), strict=True) for piece in pair]
    reshaped = (piece.reshape(leaf.shape) for piece, leaf in zip(pieces, leaves, strict=True))
    return count_nonfinite(history[:, 0]), *reshaped

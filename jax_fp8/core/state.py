"""The amax state of delayed scaling: two leaves per GEMM, in the Flax collection "fp8".

`scale` is f32[3] and `amax_history` f32[3, L]; the rows are input, kernel, output gradient. Slot 0 of a history is where a step stages
its amax (the maximum over microbatches, uses and shards); the last slot holds the newest finished step. Leaves stacked by `nn.scan` carry
leading dims. State goes in and comes out: the only update is `update_state`, once per optimizer step.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.recipe import DelayedScaling, Recipe
from jax_fp8.core.scale import scale_from_amax

INPUT, KERNEL, OUTPUT_GRADIENT = 0, 1, 2


def initial_state(recipe: DelayedScaling, kernel_amax: jax.Array) -> dict[str, jax.Array]:
    """The state of a GEMM that has not run. A kernel's amax is known, so its scale is right from the start; the others begin at 1."""
    scale = (
        jnp.ones((3,), jnp.float32)
        .at[KERNEL]
        .set(scale_from_amax(kernel_amax, recipe.fp8_format.forward, recipe.margin))
    )
    return {"scale": scale, "amax_history": jnp.zeros((3, recipe.amax_history_len), jnp.float32)}


def stage(amax_history: jax.Array, amaxes: jax.Array) -> jax.Array:
    """Raise slot 0 of the first rows of f32[..., 3, L] to the amaxes f32[..., rows] seen now; staging twice is staging once."""
    missing = amax_history.shape[-2] - amaxes.shape[-1]
    amaxes = jnp.pad(amaxes, [(0, 0)] * (amaxes.ndim - 1) + [(0, missing)])[..., None]  # an amax of 0 raises nothing
    is_slot_0 = (
        jnp.arange(amax_history.shape[-1]) == 0
    )  # a choice, which the update fuses with, and no scatter, which is a kernel
    return jnp.where(is_slot_0, jnp.maximum(amax_history, amaxes), amax_history)


def map_gemms(fn: Callable, fp8_state: Mapping, *others: Mapping) -> dict:
    """Apply `fn` to the `{"scale", "amax_history"}` of every GEMM of a collection, and to what stands there in the others."""
    if "amax_history" in fp8_state:
        return fn(fp8_state, *others)
    return {name: map_gemms(fn, child, *(other[name] for other in others)) for name, child in fp8_state.items()}


def gemm_states(fp8_state: Mapping) -> list[Mapping]:
    """The `{"scale", "amax_history"}` of every GEMM of a collection, in order."""
    found = []
    map_gemms(found.append, fp8_state)
    return found


def update_state(fp8_state: Mapping, recipe: Recipe | None) -> dict:
    """Finish an optimizer step: turn staged amaxes into the scales of the next one.

    Where the staged amax is 0 (not run) or not finite, the row stays exactly as it was before staging: same scale, same history.
    Otherwise the scale follows from the history by the recipe, the history rolls by one, and slot 0 is cleared.

    Args:
      fp8_state: the collection "fp8", or {} for a recipe without state.
      recipe: the recipe the collection was made for.

    Returns:
      A collection of the same structure.
    """
    gemms = gemm_states(fp8_state)
    if not gemms:
        return {}
    if not isinstance(recipe, DelayedScaling):
        raise ValueError(
            f"a collection with amax histories needs the DelayedScaling recipe it was made for, got recipe={recipe!r}"
        )
    lengths = {gemm["amax_history"].shape[-1] for gemm in gemms}
    if lengths != {recipe.amax_history_len}:
        raise ValueError(
            f"every amax_history must have the recipe's amax_history_len={recipe.amax_history_len}, got lengths {sorted(lengths)}; "
            "pass the recipe that the model was made with"
        )
    scales, histories = _update_rows(_joined(gemms, "scale"), _joined(gemms, "amax_history"), recipe)
    ends = np.cumsum([gemm["scale"].size // 3 for gemm in gemms])[:-1]
    pieces = iter(zip(jnp.split(scales, ends), jnp.split(histories, ends), strict=True))

    def unpack(gemm):
        scale, history = next(pieces)
        return {
            "scale": scale.reshape(gemm["scale"].shape),
            "amax_history": history.reshape(gemm["amax_history"].shape),
        }

    return map_gemms(unpack, fp8_state)


def count_nonfinite(fp8_state: Mapping) -> jax.Array:
    """How many tensors staged an amax that is infinite or NaN since the last update, int32."""
    gemms = gemm_states(fp8_state)
    if not gemms:
        return jnp.int32(0)
    return jnp.sum(~jnp.isfinite(_joined(gemms, "amax_history")[..., 0]), dtype=jnp.int32)


def keep_known_rows(before: Mapping, after: Mapping) -> dict:
    """Rows of `before` that have any history, rows of `after` where there was none: a warm start changes nothing it need not."""

    def merge(old, new):
        known = jnp.any(old["amax_history"] != 0, axis=-1)
        return {
            "scale": jnp.where(known, old["scale"], new["scale"]),
            "amax_history": jnp.where(known[..., None], old["amax_history"], new["amax_history"]),
        }

    return map_gemms(merge, before, after)


def _joined(gemms, name) -> jax.Array:
    """An array of all GEMMs, f32[gemms, 3] or f32[gemms, 3, L]: a step then pays a few kernels and not a few per layer, and not twice when it is asked for twice."""
    return jnp.concatenate([gemm[name].reshape(-1, *gemm[name].shape[gemm["scale"].ndim - 1 :]) for gemm in gemms])


def _update_rows(scale, history, recipe):  # f32[gemms, 3], f32[gemms, 3, L]
    staged = history[..., 0]
    ran = (staged > 0) & jnp.isfinite(staged)
    amax = jnp.max(history, axis=-1) if recipe.amax_compute_algo == "max" else staged
    forward, backward = recipe.fp8_format.forward, recipe.fp8_format.backward
    new_scale = jnp.concatenate(
        [
            scale_from_amax(amax[:, :OUTPUT_GRADIENT], forward, recipe.margin),
            scale_from_amax(amax[:, OUTPUT_GRADIENT:], backward, recipe.margin),
        ],
        axis=-1,
    )
    unstaged = history.at[..., 0].set(0)
    rolled = jnp.roll(history, -1, axis=-1).at[..., 0].set(0)
    return jnp.where(ran, new_scale, scale), jnp.where(ran[..., None], rolled, unstaged)

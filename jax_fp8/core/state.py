"""The amax state of delayed scaling: two leaves per GEMM, in the Flax collection "fp8".

`scale` is f32[3] and `amax_history` f32[3, L]; the rows are input, kernel, output gradient. A step stages its amax (the
maximum over microbatches, uses and shards) in slot 0 of a history; the last slot holds the amax of the newest finished
step. Leaves stacked by `nn.scan` have leading dims. State goes in and comes out: the only update is `update_state`,
once per optimizer step.

Between a backward pass and the state, the amaxes of all GEMMs are one array f32[rows], in the order of `gemm_states`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8.core.checks import describe
from jax_fp8.core.formats import KERNEL
from jax_fp8.core.paths import LayerPath
from jax_fp8.core.recipe import DelayedScaling
from jax_fp8.core.scale import scale_from_amax
from jax_fp8.core.types import PyTree

JOINED = 24  # GEMMs whose amaxes one fusion concatenates
LEAVES = "scale", "amax_history"
GemmState = Mapping[str, jax.Array]


def initial_state(recipe: DelayedScaling, kernel_amax: jax.Array) -> dict[str, jax.Array]:
    """The state of a GEMM that has not run.

    A kernel's amax is known, so its scale is right from the start; the other scales begin at 1.
    """
    scale = (
        jnp.ones((3,), jnp.float32)
        .at[KERNEL]
        .set(scale_from_amax(kernel_amax, recipe.fp8_format.forward, recipe.margin))
    )
    return {"scale": scale, "amax_history": jnp.zeros((3, recipe.amax_history_len), jnp.float32)}


def stage(amax_history: jax.Array, amaxes: jax.Array) -> jax.Array:
    """Raise slot 0 of the first rows of f32[..., 3, L] to the amaxes f32[..., rows]. Staging the same amaxes twice
    changes nothing.
    """
    missing = amax_history.shape[-2] - amaxes.shape[-1]
    amaxes = jnp.pad(amaxes, [(0, 0)] * (amaxes.ndim - 1) + [(0, missing)])[..., None]  # an amax of 0 raises nothing
    is_slot_0 = jnp.arange(amax_history.shape[-1]) == 0  # a select, which XLA fuses with others, and no scatter
    return jnp.where(is_slot_0, jnp.maximum(amax_history, amaxes), amax_history)


def join_amaxes(amaxes: Sequence[jax.Array]) -> jax.Array:
    """The amaxes f32[..., 3] of all GEMMs as f32[rows].

    On a GPU each amax is a scalar that another kernel has written, and one fusion takes less than a hundred of them. A
    longer concatenation XLA would compile into one kernel per GEMM, so amaxes are concatenated in groups.
    """
    flat = [array.reshape(-1) for array in amaxes]
    groups = [jnp.concatenate(flat[start : start + JOINED]) for start in range(0, len(flat), JOINED)]
    if len(groups) < 2:
        return groups[0] if groups else jnp.zeros((0,), jnp.float32)
    return jnp.concatenate(lax.optimization_barrier(groups))  # the barrier keeps XLA from merging the groups again


def stage_joined(fp8_state: Mapping, amaxes: jax.Array) -> dict:
    """`stage` in every GEMM of a collection, with amaxes f32[rows] in the order of `join_amaxes`."""
    sizes = [gemm["scale"].size for gemm in gemm_states(fp8_state)]
    pieces = iter(jnp.split(amaxes, np.cumsum(sizes, dtype=int)[:-1]))

    def stage_gemm(gemm: GemmState) -> GemmState:
        return {**gemm, "amax_history": stage(gemm["amax_history"], next(pieces).reshape(gemm["scale"].shape))}

    return map_gemms(stage_gemm, fp8_state)


def no_amaxes(fp8_state: Mapping) -> jax.Array:
    """f32[rows] of zeros, which raise nothing; under a `jax.vmap` over the state, zeros for each example."""
    return join_amaxes([jnp.where(False, gemm["scale"], jnp.float32(0)) for gemm in gemm_states(fp8_state)])


def map_gemms(fn: Callable[..., PyTree], fp8_state: Mapping, *others: Mapping) -> dict:
    """Apply `fn` to the `{"scale", "amax_history"}` of every GEMM of a collection, and to the nodes of `others` at the
    same path; in the order of their names, like `jax.tree.map`.
    """
    return map_gemms_with_path(lambda _, *gemms: fn(*gemms), fp8_state, *others)


def map_gemms_with_path(fn: Callable[..., PyTree], fp8_state: Mapping, *others: Mapping, path: LayerPath = ()) -> dict:
    """`map_gemms`, where `fn` takes the path of the GEMM first; `path` leads to the collection itself."""
    if not isinstance(fp8_state, Mapping):
        raise ValueError(
            'the collection "fp8" must be dicts that end in {"scale", "amax_history"}, '
            f'got {describe(fp8_state)} at {"/".join(path) or "its root"}; pass variables["fp8"]'
        )
    if "amax_history" in fp8_state:
        return fn(path, fp8_state, *others)
    return {
        name: map_gemms_with_path(fn, fp8_state[name], *(other[name] for other in others), path=(*path, name))
        for name in sorted(fp8_state)
    }


def check_dtypes(fp8_state: Mapping) -> None:
    """Raise unless a whole collection is float32; it is not where a user has cast all variables of a model."""
    map_gemms_with_path(
        lambda path, gemm: check_dtype("/".join(path), **{name: gemm.get(name) for name in LEAVES}), fp8_state
    )


def check_dtype(layer: str, **leaves: jax.Array | None) -> None:
    """Raise unless these leaves of a GEMM's state are float32; None stands for a leaf that does not exist."""
    for name, leaf in leaves.items():
        if leaf is not None and leaf.dtype != jnp.float32:
            raise ValueError(
                f"the FP8 state must be float32, got {name} of {layer or 'the layer'} as {describe(leaf)}; "
                'leave out the collection "fp8" when variables are cast to another dtype'
            )


def gemm_states(fp8_state: Mapping) -> list[GemmState]:
    """The `{"scale", "amax_history"}` of every GEMM of a collection, in order."""
    gemms: list[GemmState] = []
    map_gemms(gemms.append, fp8_state)
    return gemms


def known_rows(gemm: GemmState) -> jax.Array:
    """Which rows of a GEMM have a scale that a step or calibration has found, bool[..., 3]; of jax's arrays or NumPy's.

    A row with an amax in its history is known. A history of one slot is empty after each step, because that slot is for
    staging. Then a row is known if its scale is no longer the initial 1; and the row of the kernel, which begins with a
    scale of its own, if another row is known.
    """
    scale, history = gemm["scale"], gemm["amax_history"]
    has_history = (history != 0).any(-1)
    if history.shape[-1] > 1:
        return has_history
    moved, is_kernel = scale != 1, np.arange(3) == KERNEL
    has_run = (moved & ~is_kernel).any(-1, keepdims=True)
    return has_history | (moved & ~is_kernel) | (has_run & is_kernel)


def keep_known_rows(before: Mapping, after: Mapping) -> dict:
    """The known rows of `before`, and the rows of `after` elsewhere: a warm start replaces unknown rows only."""

    def merge(old: GemmState, new: GemmState) -> GemmState:
        known = known_rows(old)
        return {
            "scale": jnp.where(known, old["scale"], new["scale"]),
            "amax_history": jnp.where(known[..., None], old["amax_history"], new["amax_history"]),
        }

    return map_gemms(merge, before, after)


def cold_rows(fp8_state: Mapping) -> Any:
    """For each row of a collection, in the order of `join_amaxes`, whether it is not known yet, bool[rows]: of NumPy,
    if the state is.
    """
    rows = [~known_rows(gemm).reshape(-1) for gemm in gemm_states(fp8_state)]
    is_on_device = any(isinstance(of_gemm, jax.Array) for of_gemm in rows)
    return jnp.concatenate(rows) if is_on_device else np.concatenate([np.zeros(0, bool), *rows])

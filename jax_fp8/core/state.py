"""The amax state of delayed scaling: two leaves per GEMM, in the Flax collection "fp8".

`scale` is f32[3] and `amax_history` f32[3, L]; the rows are input, kernel, output gradient. Slot 0 of a history is
where a step stages its amax (the maximum over microbatches, uses and shards); the last slot holds the newest finished
step. Leaves stacked by `nn.scan` carry leading dims. State goes in and comes out:
the only update is `update_state`, once per optimizer step.

Between a backward pass and the state, amaxes travel as one array f32[rows]:
the rows of all GEMMs, in the order of `gemm_states`.
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

JOINED = 24  # GEMMs
LEAVES = "scale", "amax_history"


def initial_state(recipe: DelayedScaling, kernel_amax: jax.Array) -> dict[str, jax.Array]:
    """The state of a GEMM that has not run.

    A kernel's amax is known, so its scale is right from the start; the others begin at 1.
    """
    scale = (
        jnp.ones((3,), jnp.float32)
        .at[KERNEL]
        .set(scale_from_amax(kernel_amax, recipe.fp8_format.forward, recipe.margin))
    )
    return {"scale": scale, "amax_history": jnp.zeros((3, recipe.amax_history_len), jnp.float32)}


def stage(amax_history: jax.Array, amaxes: jax.Array) -> jax.Array:
    """Raise slot 0 of the first rows of f32[..., 3, L] to the amaxes f32[..., rows] seen now;
    staging twice is staging once.
    """
    missing = amax_history.shape[-2] - amaxes.shape[-1]
    amaxes = jnp.pad(amaxes, [(0, 0)] * (amaxes.ndim - 1) + [(0, missing)])[..., None]  # an amax of 0 raises nothing
    is_slot_0 = jnp.arange(amax_history.shape[-1]) == 0  # a choice, which fuses with others, and no scatter
    return jnp.where(is_slot_0, jnp.maximum(amax_history, amaxes), amax_history)


def join_amaxes(amaxes: Sequence[jax.Array]) -> jax.Array:
    """The amaxes f32[..., 3] of all GEMMs as f32[rows].

    On a GPU each is some kernel's scalar, and a fusion takes less than a hundred of them.
    Of a longer list XLA would make one kernel per GEMM.
    """
    flat = [array.reshape(-1) for array in amaxes]
    groups = [jnp.concatenate(flat[start : start + JOINED]) for start in range(0, len(flat), JOINED)]
    if len(groups) < 2:
        return groups[0] if groups else jnp.zeros((0,), jnp.float32)
    return jnp.concatenate(lax.optimization_barrier(groups))  # or XLA makes one long list of them again


def stage_joined(fp8_state: Mapping, amaxes: jax.Array) -> dict:
    """`stage` in every GEMM of a collection, the amaxes f32[rows] as `join_amaxes` joins them."""
    sizes = [gemm["scale"].size for gemm in gemm_states(fp8_state)]
    pieces = iter(jnp.split(amaxes, np.cumsum(sizes, dtype=int)[:-1]))

    def stage_gemm(gemm):
        return {**gemm, "amax_history": stage(gemm["amax_history"], next(pieces).reshape(gemm["scale"].shape))}

    return map_gemms(stage_gemm, fp8_state)


def no_amaxes(fp8_state: Mapping) -> jax.Array:
    """f32[rows] of zeros, which raise nothing; under a `jax.vmap` over the state, zeros for each of the batch."""
    return join_amaxes([jnp.where(False, gemm["scale"], jnp.float32(0)) for gemm in gemm_states(fp8_state)])


def map_gemms(fn: Callable, fp8_state: Mapping, *others: Mapping) -> dict:
    """Apply `fn` to the `{"scale", "amax_history"}` of every GEMM of a collection, and to what stands there in the
    others; in the order of their names, like `jax.tree.map`.
    """
    return map_gemms_with_path(lambda _, *gemms: fn(*gemms), fp8_state, *others)


def map_gemms_with_path(fn: Callable, fp8_state: Mapping, *others: Mapping, path: LayerPath = ()) -> dict:
    """`map_gemms` of a function that takes the path of the GEMM first; `path` leads to the collection itself."""
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
    """Raise unless all of a collection is float32, as when the whole of a model was cast to another dtype."""
    map_gemms_with_path(
        lambda path, gemm: check_dtype("/".join(path), **{name: gemm.get(name) for name in LEAVES}), fp8_state
    )


def check_dtype(layer: str, **leaves: Any) -> None:
    """Raise unless these leaves of a GEMM's state are float32; what is None is not there."""
    for name, leaf in leaves.items():
        if leaf is not None and leaf.dtype != jnp.float32:
            raise ValueError(
                f"the FP8 state must be float32, got {name} of {layer or 'the layer'} as {describe(leaf)}; "
                'leave out the collection "fp8" when variables are cast to another dtype'
            )


def gemm_states(fp8_state: Mapping) -> list[Mapping]:
    """The `{"scale", "amax_history"}` of every GEMM of a collection, in order."""
    found = []
    map_gemms(found.append, fp8_state)
    return found


def known_rows(gemm: Mapping) -> Any:
    """Which rows of a GEMM have a scale that some step or calibration found, bool[..., 3]; of NumPy's arrays or jax's.

    A history says so. One of a single slot is empty after each step, as that slot is where amaxes are staged: there a
    scale other than the 1 it began with says so, and of a kernel, which began with its own, that of another row.
    """
    scale, history = gemm["scale"], gemm["amax_history"]
    has_history = (history != 0).any(-1)
    if history.shape[-1] > 1:
        return has_history
    moved, is_kernel = scale != 1, np.arange(3) == KERNEL
    has_run = (moved & ~is_kernel).any(-1, keepdims=True)
    return has_history | (moved & ~is_kernel) | (has_run & is_kernel)


def keep_known_rows(before: Mapping, after: Mapping) -> dict:
    """Rows of `before` that are known, rows of `after` elsewhere: a warm start changes nothing it need not."""

    def merge(old, new):
        known = known_rows(old)
        return {
            "scale": jnp.where(known, old["scale"], new["scale"]),
            "amax_history": jnp.where(known[..., None], old["amax_history"], new["amax_history"]),
        }

    return map_gemms(merge, before, after)


def cold_rows(fp8_state: Mapping) -> Any:
    """Of each row of a collection, as amaxes are joined, whether it is not known yet, bool[rows]."""
    rows = [~known_rows(gemm).reshape(-1) for gemm in gemm_states(fp8_state)]
    are_arrays = any(isinstance(of_gemm, jax.Array) for of_gemm in rows)
    return jnp.concatenate(rows) if are_arrays else np.concatenate([np.zeros(0, bool), *rows])

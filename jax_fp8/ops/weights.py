"""The kernels of many GEMMs in FP8: nested dicts like the collection "fp8_cache", with an `Fp8Pair` for each GEMM.

The weight cache of training (state/weight_cache.py) and text generation are made of them.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import jax

from jax_fp8.core.cast import Cast
from jax_fp8.core.checks import describe
from jax_fp8.core.formats import KERNEL
from jax_fp8.core.fp8_array import Fp8Pair
from jax_fp8.core.paths import LayerPath, at_path, is_of_experts, kernel_paths, put_at_path
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.shards import current_amax_axes, largest_amax
from jax_fp8.ops.parameters import as_one_matrix
from jax_fp8.ops.passes import cast_weight


def cast_gemms(
    params: Mapping,
    fp8_state: Mapping,
    recipes: Mapping[LayerPath, Recipe],
    then: Mapping[LayerPath, Callable[[Fp8Pair], Fp8Pair]] = MappingProxyType({}),
) -> dict:
    """The kernels of GEMMs in FP8, each by its recipe: with the scale in the state, or without state by their own amax.

    Args:
      then: functions to apply to the weights of some GEMMs.

    GEMMs without a kernel at a path are left out.
    """
    cache: dict = {}
    for path, recipe in recipes.items():
        if not kernel_paths(path):
            continue
        state = at_path(fp8_state, path)
        scales = state["scale"] if state else None
        pair = cast_kernels(kernels_of(path, params), _cast_of(recipe), scales, then.get(path))
        put_at_path(cache, path, {"kernel": pair})
    return cache


def kernels_of(gemm: LayerPath, params: Mapping) -> tuple[jax.Array, ...]:
    """The kernels of a GEMM, side by side; kernels of experts as one matrix each."""
    kernels = tuple(at_path(params, kernel) for kernel in kernel_paths(gemm))
    for path, kernel in zip(kernel_paths(gemm), kernels, strict=True):
        if not hasattr(kernel, "ndim"):
            raise ValueError(
                f"params must have the kernel {'/'.join(path)} of a GEMM in the FP8 state or cache, "
                f"got {describe(kernel)}; pass params and state of one model"
            )
    return tuple(map(as_one_matrix, kernels)) if is_of_experts(gemm) else kernels  # type: ignore[return-value]


def cast_kernels(
    kernels: tuple[jax.Array, ...],
    cast_of: Callable[[jax.Array | None, Callable[[], jax.Array]], Cast],
    scales: jax.Array | None,
    then: Callable[[Fp8Pair], Fp8Pair] | None = None,
) -> Fp8Pair:
    """Kernels (k, n_i) side by side in FP8, by `cast_of(scales, measure)`; `scales` f32[3], or None."""
    first, *others = kernels
    if first.ndim > 2:  # stacked layers, each with its own scales or none
        return jax.vmap(lambda each, its_scales: cast_kernels(each, cast_of, its_scales, then))(kernels, scales)
    pair = cast_weight(kernels if others else first, partial(cast_of, scales))
    return pair if then is None else then(pair)


def frozen_weight(recipe: Recipe, kernels: tuple[jax.Array, ...]) -> Fp8Pair:
    """Kernels (k, n_i) side by side as a frozen weight (core/frozen.py), scaled by their own amax."""
    return cast_kernels(kernels, _cast_of(recipe), None, transpose_alone)


def transpose_alone(pair: Fp8Pair) -> Fp8Pair:
    """What a frozen weight keeps of its cast."""
    return Fp8Pair(None, pair.columnwise, pair.amax)


def _cast_of(recipe: Recipe) -> Callable[[jax.Array | None, Callable[[], jax.Array]], Cast]:
    """A recipe's cast of a kernel, of which this device may have a part."""

    def cast_of(scales: jax.Array | None, measure: Callable[[], jax.Array]) -> Cast:
        return recipe.cast(KERNEL, scales, lambda: largest_amax(measure(), current_amax_axes()))

    return cast_of

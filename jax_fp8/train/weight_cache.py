"""The weights in FP8, cast once: the collection "fp8_cache", with a `CachedWeight` for the kernel of every GEMM.

A cached weight carries the scale it was cast with, so a later change of scales does not touch it, and the amax it was measured with, so a layer
that reads the cache stages what a layer that casts would. The weights are those of an uncached step, bit for bit; what XLA sums by itself (the
gradients of biases, norms and embeddings) it may sum in another order in another program.

    params, scales ─cast_weights→ cache ─forward, backward→ gradients ─fused_adam→ params, and the cache for the next step
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jax_fp8.core.cached_weight import CachedWeight
from jax_fp8.core.recipe import DelayedScaling, Recipe
from jax_fp8.core.state import KERNEL, map_gemms
from jax_fp8.ops.quantize import ScaleSource, quantize_transpose
from jax_fp8.train.updates import NewParam, is_fp8


def cast_weights(variables: Mapping, recipe: Recipe) -> dict:
    """Cast the kernel of every GEMM with the scale that its state has now.

    Args:
      variables: "params" and "fp8", as `model.init` returned them.
      recipe: the model's, a `DelayedScaling`.

    Returns:
      The collection for `variables["fp8_cache"]`. It belongs to these params and scales: make it again when either changes.
    """
    fp8_state = variables.get("fp8", {})
    if not isinstance(recipe, DelayedScaling) or not fp8_state:
        raise ValueError(
            f'cast_weights needs the DelayedScaling recipe and the collection "fp8" of its model, got recipe={recipe!r} and '
            f"{sorted(variables)}; other recipes have no scales to cast with before the weights are read"
        )
    dtype = recipe.fp8_format.forward

    def cast(gemm, params):
        return {"kernel": _cast(params["kernel"], gemm["scale"], dtype)}

    return map_gemms(cast, fp8_state, variables["params"])


def cast_requests(cache: Mapping, params: Mapping, fp8_state: Mapping) -> dict[str, tuple[CachedWeight, jax.Array]]:
    """For `InPlace`: which weights an optimizer is to write in FP8, and the scales of `fp8_state` to write them with.

    Layers stacked by `nn.scan` have a scale each and are left to `refresh`.
    """
    return {
        path: (_at(cache, names), _at(fp8_state, names[:-1])["scale"][KERNEL])
        for path, names in _kernels(params, cache)
        if _at(params, names).ndim == 2
    }


def refresh(cache: Mapping, params: Mapping, fp8_state: Mapping, updates: Any = None) -> dict:
    """The cache of new params or scales: as the optimizer wrote it, where `updates` are its, and cast here where it did not."""
    written = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(updates, is_leaf=is_fp8)
        if isinstance(leaf, NewParam)
    }
    paths = {names: path for path, names in _kernels(params, cache)}

    def renew(node, names) -> Any:
        if not isinstance(node, CachedWeight):
            return {name: renew(child, (*names, name)) for name, child in node.items()}
        new = written.get(paths[names])
        if new is not None and new.cast is not None:
            return new.cast
        return _cast(_at(params, names), _at(fp8_state, names[:-1])["scale"], node.values.dtype)

    return renew(cache, ())


def _cast(kernel, scales, dtype) -> CachedWeight:  # (k, n), f32[3]
    if kernel.ndim > 2:  # stacked layers
        return jax.vmap(lambda one, its_scales: _cast(one, its_scales, dtype))(kernel, scales)
    values, values_t, amax = quantize_transpose(kernel, dtype, ScaleSource.row_of(scales, KERNEL))
    return CachedWeight(values.values, values_t.values, values.scale, amax)


def _kernels(params, cache) -> Iterator[tuple[str, tuple]]:
    """Path and names of every param that has a cached copy."""
    for path, _ in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_fp8):
        names = tuple(getattr(key, "key", None) for key in path)
        if isinstance(_at(cache, names), CachedWeight):
            yield jax.tree_util.keystr(path), names


def _at(tree, names) -> Any:
    """The node of nested dicts that these names lead to, or None."""
    for name in names:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree

"""The weights in FP8, cast once: the collection "fp8_cache", with a `Fp8Pair` for the kernels of every GEMM.

A cached weight carries the scale it was cast with, so a later change of scales does not touch it, and the amax it was
measured with, so a layer that reads the cache stages what a layer that casts would. The weights are those of an
uncached step, bit for bit; what XLA sums by itself (the gradients of biases, norms and embeddings) it may sum in
another order in another program.

    params, scales ─cast_weights→ cache ─forward, backward→ gradients ─fused_adam→ params, and the next step's cache

The cache also carries the version of the params it was made from, a hash of samples of them. Whoever reads a cache
compares versions first, on the device, and casts again where they differ: after an optimizer step, a checkpoint or an
overwritten weight, no flag need be remembered.
"""

import warnings
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jax_fp8.core.cast import Cast
from jax_fp8.core.checks import describe, first_difference
from jax_fp8.core.formats import KERNEL
from jax_fp8.core.fp8_array import Fp8Pair, is_fp8
from jax_fp8.core.paths import LayerPath, at_path, kernel_paths, names_of, put_at_path
from jax_fp8.core.recipe import Recipe, check_recipe
from jax_fp8.core.state import map_gemms_with_path
from jax_fp8.kernels.explicit import whole_first
from jax_fp8.ops.weights import cast_gemms, cast_kernels, kernels_of
from jax_fp8.optim.updates import NewParam
from jax_fp8.parallel.names import without_names
from jax_fp8.train.checks import check_variables

VERSION = "params_version"


def cast_weights(
    variables: Mapping,
    recipe: Recipe,
    cache: Mapping | None = None,
    is_first_microbatch: bool | jax.Array | None = None,
) -> dict:
    """The kernel of every GEMM in FP8, cast with the scale that its state has now, or kept from a cache that still
    holds.

    With a cache it is one `lax.cond` over the whole of it. Call it inside the jitted function that takes the cache, and
    donate the cache there: then keeping it costs nothing, while a cache that is not donated is copied. (The compiler of
    jax 0.10 copies it in any case; since 0.11 it does not.)

    Args:
      variables: "params" and "fp8", as `model.init` returned them.
      recipe: the model's, a `DelayedScaling`.
      cache: of an earlier microbatch, or None: cast.
      is_first_microbatch: bool, or bool[] that may be traced: cast. Where it is False or None, a cache is kept while
        the params are those that it was made from, and made again otherwise: their version tells. That is a hash of the
        first row and the first column of each kernel, so it can miss a change of a few elements; the first microbatch
        of the next step does not.

    Returns:
      The collection for `variables["fp8_cache"]`.
    """
    variables = without_names(variables)
    _check_recipe(variables, recipe)
    first = False if is_first_microbatch is None else is_first_microbatch
    check_flag(first)
    if cache is None:
        return _cast_all(variables, recipe)
    _check_cache(cache, variables, recipe)
    _warn_of_copies(cache)
    return lax.cond(first | is_stale(cache, variables), lambda _: _cast_all(variables, recipe), dict, dict(cache))


def is_stale(cache: Mapping, variables: Mapping) -> jax.Array:
    """Whether a cache was made from other params than these, bool[]."""
    return cache[VERSION] != _version(variables["params"], cache)


def renewed(cache: Mapping, variables: Mapping, recipe: Recipe) -> dict:
    """A cache that belongs to these variables: this one, as a rule."""
    return cast_weights(variables, recipe, cache) if cache else {}


def cast_listed(params: Mapping, recipe: Recipe | None, gemms: Collection[LayerPath]) -> dict:
    """`cast_weights` for a recipe without state: the kernels of these GEMMs, each GEMM's with a scale of its own."""
    return with_version(cast_gemms(params, {}, dict.fromkeys(gemms, recipe)), params)


def with_version(cache: Mapping, params: Mapping) -> dict:
    """A cache that says of which params it was made; {} if it holds nothing."""
    return {**cache, VERSION: _version(params, cache)} if cache else {}


def _cast_all(variables, recipe) -> dict:
    recipes: dict = {}
    map_gemms_with_path(lambda path, _: recipes.setdefault(path, recipe), variables["fp8"])
    return with_version(cast_gemms(variables["params"], variables["fp8"], recipes), variables["params"])


def _version(params, cache) -> jax.Array:
    """A hash, uint32[], of the kernels that have a cached copy: of their samples,
    each times an odd number of its place."""
    samples = [_samples(kernel) for path, _ in _cached(cache) for kernel in kernels_of(path, params)]
    words = jnp.concatenate(samples)
    place = jnp.arange(words.size, dtype=jnp.uint32)
    return jnp.sum(words * (2 * place * np.uint32(0x9E3779B1) + 1), dtype=jnp.uint32)


def _samples(kernel) -> jax.Array:
    """The bits of the first row and of the first column of (..., k, n):
    one element of every column and of every row."""
    sampled = [whole_first(kernel, dim).reshape(-1) for dim in (-2, -1)]
    bits = [lax.bitcast_convert_type(line, f"uint{8 * kernel.dtype.itemsize}") for line in sampled]
    return jnp.concatenate(bits).astype(jnp.uint32)


def cast_requests(
    cache: Mapping, params: Mapping, fp8_state: Mapping
) -> dict[LayerPath | tuple[LayerPath, ...], tuple[Fp8Pair, jax.Array]]:
    """For `InPlace`: which weights an optimizer is to write in FP8, and the scales of `fp8_state` to write them with.

    Layers stacked by `nn.scan`, which have a scale each, are left to `refresh`.
    """
    requests = {}
    for path, pair in _cached(cache):
        kernels = kernel_paths(path)
        if all(kernel.ndim == 2 for kernel in kernels_of(path, params)):
            first, *others = kernels
            requests[kernels if others else first] = pair, _scales_of(path, fp8_state)[KERNEL]
    return requests


def refresh(cache: Mapping, params: Mapping, fp8_state: Mapping, updates: Any = None) -> dict:
    """The cache of new params or scales: as the optimizer wrote it, where `updates` are its,
    and cast here where it did not."""
    leaves = jax.tree_util.tree_leaves_with_path(updates, is_leaf=is_fp8)
    written = {names_of(path): leaf.cast for path, leaf in leaves if isinstance(leaf, NewParam)}
    renewed: dict = {}
    for path, old in _cached(cache):
        new = written.get(kernel_paths(path)[0])
        if new is None:
            cast_of = partial(_with_scale_of_state, old.rowwise.dtype)
            new = cast_kernels(kernels_of(path, params), cast_of, _scales_of(path, fp8_state))
        put_at_path(renewed, path, {"kernel": new})
    return {**renewed, VERSION: _version(params, cache)} if cache else {}


def _scales_of(gemm, fp8_state) -> jax.Array:
    state = at_path(fp8_state, gemm)
    if not isinstance(state, Mapping) or "scale" not in state:
        raise ValueError(
            f"the FP8 state must have the scale of {'/'.join(gemm)}, which the weight cache holds, "
            f"got {describe(state)}; pass state and cache of one model, or cache={{}}"
        )
    return state["scale"]


def _with_scale_of_state(dtype, scales, _measure) -> Cast:
    return Cast.with_row(dtype, scales, KERNEL)


def _cached(cache, path: LayerPath = ()) -> Iterator[tuple[LayerPath, Fp8Pair]]:
    """Every GEMM with a cached weight."""
    for name, node in sorted(cache.items()):
        if isinstance(node, Fp8Pair):
            yield path, node
        elif isinstance(node, Mapping):
            yield from _cached(node, (*path, name))


def _check_recipe(variables, recipe):
    check_variables(variables)
    check_recipe(recipe)
    if recipe is None or not recipe.has_state or not variables.get("fp8") or "params" not in variables:
        raise ValueError(
            'cast_weights needs "params" and "fp8" of a model with the DelayedScaling recipe, '
            f"got {describe(variables)} and {describe(recipe)}; pass what model.init returned. "
            "Other recipes have no scales to cast with before the weights are read"
        )


def _check_cache(cache, variables, recipe):
    expected = jax.eval_shape(lambda: _cast_all(variables, recipe))
    difference = first_difference(expected, dict(cache))
    if difference is not None:
        raise ValueError(
            f"cache must be what cast_weights made of this model with this recipe, but {difference}; "
            "make it anew with cast_weights(variables, recipe)"
        )


def check_flag(flag: Any) -> None:
    """Raise unless this is one truth value, traced or not."""
    if isinstance(flag, bool | np.bool_) or (getattr(flag, "dtype", None) == jnp.bool_ and jnp.shape(flag) == ()):
        return
    arrived = f"{flag.dtype}{list(flag.shape)}" if hasattr(flag, "dtype") else f"{type(flag).__name__} {flag!r}"
    raise ValueError(
        f"is_first_microbatch must be a bool or an array bool[], got {arrived}; pass `i == 0` for microbatch i"
    )


def _warn_of_copies(cache):
    """Outside jit nothing can be donated."""
    leaves = jax.tree.leaves(cache)
    if not any(isinstance(leaf, Tracer) for leaf in leaves):
        size = sum(leaf.nbytes for leaf in leaves)
        warnings.warn(
            "cast_weights copies the cache it is given when it is called outside jit, "
            f"{size / 2**20:,.1f} MiB a call; call it in a jitted function "
            "that takes the cache with donate_argnums",
            stacklevel=3,
        )

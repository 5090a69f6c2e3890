"""The weights in FP8, cast once: the collection "fp8_cache", with a `Fp8Pair` for the kernels of every GEMM.

A cached weight carries the scale it was cast with, so a later change of scales does not touch it, and the amax it was
measured with, so a layer that reads the cache stages what a layer that casts would. The weights are those of an
uncached step, bit for bit; what XLA sums by itself (the gradients of biases, norms and embeddings) it may sum in
another order in another program.

    params, scales ─cast_weights→ cache ─forward, backward→ gradients ─fused_adam→ params, and the next step's cache

The cache also carries the version of the params it was made from, a hash of samples of them. Whoever reads a cache
compares versions first, on the device, and casts again where they differ: after an optimizer step, a checkpoint or an
overwritten weight, no flag need be remembered. And it carries the recipe that it was cast by, as new params are.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
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
from jax_fp8.core.paths import CAST_BY, VERSION, LayerPath, at_path, kernel_paths, names_of, put_at_path
from jax_fp8.core.recipe import Recipe, check_recipe
from jax_fp8.core.recorder import listing
from jax_fp8.core.state import map_gemms_with_path
from jax_fp8.grads.gradients import with_kernels
from jax_fp8.kernels.explicit import whole_first
from jax_fp8.kernels.shared_cast import can_be_written
from jax_fp8.ops.weights import cast_gemms, kernels_of
from jax_fp8.optim.updates import NewParam
from jax_fp8.parallel.names import without_names
from jax_fp8.state.checks import check_variables
from jax_fp8.state.serialization import register_serialization


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CastBy:
    """What a cache was cast by, and is again when params are new; static, so that it has no arrays."""

    recipe: Recipe = field(metadata={"static": True})


register_serialization(CastBy, [])


def cast_weights(
    variables: Mapping,
    recipe: Recipe,
    cache: Mapping | None = None,
    is_first_microbatch: bool | jax.Array | None = None,
    *,
    forward: Callable[[dict], Any] | None = None,
) -> dict:
    """The kernel of every GEMM by this recipe in FP8: cast with the scale that its state has now, or, where the recipe
    has no state, with scales of its own; or kept from a cache that still holds.

    With a cache it is one `lax.cond` over the whole of it. Call it inside the jitted function that takes the cache, and
    donate the cache there: then keeping it costs nothing, while a cache that is not donated is copied. (The compiler of
    jax 0.10 copies it in any case; since 0.11 it does not.)

    Args:
      variables: "params", and "fp8" where the recipe has state, as `model.init` returned them.
      recipe: the model's.
      cache: of an earlier microbatch, or None: cast.
      is_first_microbatch: bool, or bool[] that may be traced: cast. Where it is False or None, a cache is kept while
        the params are those that it was made from, and made again otherwise: their version tells. That is a hash of the
        first row and the first column of each kernel, so it can miss a change of a few elements; the first microbatch
        of the next step does not.
      forward: a function of the variables that runs the model, `lambda variables: model.apply(variables, x)`. It is
        traced, and nothing is computed: a recipe without state leaves no other trace of which layers are in FP8. Needed
        for the first cache of such a recipe, and for nothing else.

    Returns:
      The collection for `variables["fp8_cache"]`.
    """
    variables = without_names(variables)
    _check_recipe(variables, recipe)
    first = False if is_first_microbatch is None else is_first_microbatch
    check_flag(first)
    gemms = _gemms_of(variables, recipe, cache, forward)
    if cache is None:
        return cast_listed(variables, recipe, gemms)
    _check_cache(cache, variables, recipe, gemms)
    _warn_of_copies(cache)
    stale = first | is_stale(cache, variables)
    return lax.cond(stale, lambda _: cast_listed(variables, recipe, gemms), dict, dict(cache))


def is_stale(cache: Mapping, variables: Mapping) -> jax.Array:
    """Whether a cache was made from other params than these, bool[]."""
    return cache[VERSION] != _version(variables["params"], cache)


def outdated(cache: Mapping) -> dict:
    """A cache that whoever reads it casts again: its version is that of no params."""
    return {**cache, VERSION: ~cache[VERSION]}


def renewed(cache: Mapping, variables: Mapping, recipe: Recipe) -> dict:
    """A cache that belongs to these variables: this one, as a rule."""
    return cast_weights(variables, recipe, cache) if cache else {}


def cast_listed(variables: Mapping, recipe: Recipe, gemms: Collection[LayerPath]) -> dict:
    """`cast_weights` of these GEMMs; {} where there are none."""
    params, fp8_state = variables["params"], variables.get("fp8", {}) if recipe.has_state else {}
    cache = cast_gemms(params, fp8_state, dict.fromkeys(gemms, recipe))
    return {**with_version(cache, params), CAST_BY: CastBy(recipe)} if cache else {}


def with_version(cache: Mapping, params: Mapping) -> dict:
    """A cache that says of which params it was made; {} if it holds nothing."""
    return {**cache, VERSION: _version(params, cache)} if cache else {}


def cached_gemms(cache: Mapping) -> list[LayerPath]:
    """The GEMMs whose weights a cache has."""
    return [path for path, _ in _cached(cache)]


def _gemms_of(variables, recipe, cache, forward) -> list[LayerPath]:
    """The GEMMs whose weights are cast: those of the state; without one those of the cache, or that are traced."""
    if recipe.has_state:
        paths: list[LayerPath] = []
        map_gemms_with_path(lambda path, _: paths.append(path), variables["fp8"])
        return paths
    if cache is not None:
        return cached_gemms(cache)
    if forward is None:
        raise ValueError(
            f"cast_weights must know which layers are in FP8, and {type(recipe).__name__} leaves no trace of them in "
            "the variables, got neither a cache nor forward; pass forward=lambda variables: model.apply(variables, x)"
        )
    with listing() as found:
        jax.eval_shape(lambda *given: forward(*given), variables)
    paths = with_kernels([path for path, gemm in found.items() if gemm.recipe == recipe], variables["params"])
    if not paths:
        raise ValueError(
            f"forward must run layers with {recipe!r}, whose kernels are among the params by the path of their layer, "
            f"got {len(found)} other layers in FP8; pass the recipe of the model"
        )
    return paths


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
) -> dict[LayerPath | tuple[LayerPath, ...], tuple[Fp8Pair, Cast]]:
    """For `InPlace`: which weights an optimizer is to write in FP8, and how they are cast, with scales of `fp8_state`
    or of their squares.

    Left to `refresh` are layers stacked by `nn.scan`, which have a scale each; a recipe that measures a whole tensor
    before it is cast; and kernels side by side of which two share a square.
    """
    requests = {}
    for path, pair in _cached(cache):
        kernels, arrays = kernel_paths(path), kernels_of(path, params)
        if any(kernel.ndim != 2 for kernel in arrays):
            continue
        cast = _cast_of(cache[CAST_BY].recipe, path, fp8_state)
        if can_be_written(cast.rule, [kernel.shape[1] for kernel in arrays]):
            first, *others = kernels
            requests[kernels if others else first] = pair, cast
    return requests


def refresh(cache: Mapping, params: Mapping, fp8_state: Mapping, updates: Any = None) -> dict:
    """The cache of new params or scales: as the optimizer wrote it, where `updates` are its,
    and cast here where it did not."""
    if not cache:
        return {}
    leaves = jax.tree_util.tree_leaves_with_path(updates, is_leaf=is_fp8)
    by_kernel = {names_of(path): leaf.cast for path, leaf in leaves if isinstance(leaf, NewParam)}
    written = {path: by_kernel.get(kernel_paths(path)[0]) for path in cached_gemms(cache)}
    recipe = cache[CAST_BY].recipe
    others = [path for path, pair in written.items() if pair is None]
    for path in others:
        _check_has_scale(recipe, path, fp8_state)
    renewed = cast_gemms(params, fp8_state, dict.fromkeys(others, recipe))
    for path, pair in written.items():
        if pair is not None:
            put_at_path(renewed, path, {"kernel": pair})
    return {**renewed, VERSION: _version(params, cache), CAST_BY: cache[CAST_BY]}


def _cast_of(recipe, gemm, fp8_state) -> Cast:
    """How a kernel is cast, as far as that is known before it is there."""
    _check_has_scale(recipe, gemm, fp8_state)
    scales = at_path(fp8_state, gemm)["scale"] if recipe.has_state else None
    return recipe.cast(KERNEL, scales, lambda: np.float32(1))


def _check_has_scale(recipe, gemm, fp8_state) -> None:
    state = at_path(fp8_state, gemm)
    if recipe.has_state and (not isinstance(state, Mapping) or "scale" not in state):
        raise ValueError(
            f"the FP8 state must have the scale of {'/'.join(gemm)}, which the weight cache holds, "
            f"got {describe(state)}; pass state and cache of one model, or cache={{}}"
        )


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
    if recipe is None or "params" not in variables or (recipe.has_state and not variables.get("fp8")):
        raise ValueError(
            'cast_weights needs a recipe and "params", with DelayedScaling also "fp8", of a model with this recipe, '
            f"got {describe(variables)} and {describe(recipe)}; pass what model.init returned"
        )


def _check_cache(cache, variables, recipe, gemms):
    expected = jax.eval_shape(lambda: cast_listed(variables, recipe, gemms))
    difference = first_difference(expected, dict(cache))
    if difference is None and jax.tree.structure(expected) != jax.tree.structure(dict(cache)):
        difference = f"it was cast by {cache[CAST_BY].recipe!r}, not by {recipe!r}"
    if difference is not None or not gemms:
        raise ValueError(
            f"cache must be what cast_weights made of this model with this recipe, but {difference or 'it is empty'}; "
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

"""The weights in FP8, cast once: the collection "fp8_cache", with a `Fp8Pair` for the kernels of every GEMM.

    params, scales ─cast_weights→ cache ─forward, backward→ gradients ─fused_adam→ params, and the next step's cache

A cached weight has its own scale, so a later change of scales does not affect it. It also has its amax, so a layer that
reads the cache stages the same amax as a layer that casts. The weights are those of an uncached step, bit for bit. Sums
that XLA computes by itself (the gradients of biases, norms and embeddings) may have another order in another program.

The cache also has the version of its params, a hash of samples of them. A reader of the cache compares versions first,
on the device, and casts again where they differ. So after an optimizer step, a checkpoint or an overwritten weight, no
flag need be set. And the cache has the recipe it was cast by, for casts of new params.
"""

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jax_fp8.core.cast import Cast
from jax_fp8.core.checks import describe, first_difference
from jax_fp8.core.formats import KERNEL
from jax_fp8.core.fp8_array import Fp8Pair, is_fp8
from jax_fp8.core.frozen import is_frozen
from jax_fp8.core.paths import CAST_BY, VERSION, LayerPath, at_path, kernel_paths, names_of, put_at_path
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.recipe_rules import RecipeOrRules, step_recipe
from jax_fp8.core.recorder import listing
from jax_fp8.core.state import map_gemms_with_path
from jax_fp8.core.types import PyTree, Variables
from jax_fp8.grads.gradients import with_kernels
from jax_fp8.kernels.shared_cast import can_be_written
from jax_fp8.ops.weight_version import cached_weights, is_stale, version_of
from jax_fp8.ops.weights import cast_gemms, kernels_of
from jax_fp8.optim.updates import NewParam
from jax_fp8.parallel.names import without_names
from jax_fp8.state.checks import check_variables
from jax_fp8.state.serialization import register_serialization


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CastBy:
    """The recipe by which a cache was cast, and by which new params are cast; static, so that it has no arrays."""

    recipe: Recipe = field(metadata={"static": True})


register_serialization(CastBy, [])


def cast_weights(
    variables: Variables,
    recipe: RecipeOrRules,
    cache: Mapping | None = None,
    is_first_microbatch: bool | jax.Array | None = None,
    *,
    forward: Callable[[dict], object] | None = None,
) -> dict[str, PyTree]:
    """Cast the kernels of all GEMMs to FP8 once, for several passes; or take a cache that is still valid.

    The GEMMs are those of this recipe. A kernel is cast with the scale that its state has now, or, where the recipe has
    no state, with scales of its own.

    With a cache this is one `lax.cond` over the whole cache. Call it inside the jitted function that takes the cache,
    and donate the cache there: then a valid cache costs nothing, while a cache that is not donated is copied. (The
    compiler of jax 0.10 always copies it; since 0.11 it does not.)

    Args:
      variables: "params", and "fp8" where the recipe has state, as `model.init` returned them.
      recipe: the model's. Of rules, GEMMs with another recipe than that of a step are cast in each pass.
      cache: the cache of an earlier microbatch, or None, to cast.
      is_first_microbatch: bool, or bool[] that may be traced. True: cast. False or None: cast only if the params have
        another version than the cache. The version is a hash of the first row and the first column of each kernel. So
        it can miss a change of a few elements, until the first microbatch of the next step.
      forward: a function of the variables that runs the model, `lambda variables: model.apply(variables, x)`. It is
        traced to find the layers in FP8, and computes nothing. Only the first cache of a recipe without state needs it,
        because such a recipe leaves no variables that name these layers.

    Returns:
      The collection for `variables["fp8_cache"]`.

    Raises:
      ValueError: if `variables`, `recipe` and `cache` are not of one model, `forward` is missing or runs no such layer,
        or `is_first_microbatch` is not one truth value.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> layer, x = fp8.Dense(32), jnp.ones((2, 16))
      >>> variables = layer.init(jax.random.key(0), x)
      >>> cache = fp8.cast_weights(variables, layer.recipe)
      >>> cache["kernel"].rowwise.shape, cache["kernel"].rowwise.dtype.name
      ((16, 32), 'float8_e4m3fn')
      >>> layer.apply({**variables, "fp8_cache": cache}, x).shape
      (2, 32)
    """
    variables = without_names(variables)
    recipe = check_can_be_cast("cast_weights", variables, recipe)
    is_first = False if is_first_microbatch is None else is_first_microbatch
    check_flag(is_first)
    gemms = gemms_of_recipe(variables, recipe, cache, forward)
    if cache is None:
        return cast_listed(variables, recipe, gemms)
    _check_cache(cache, variables, recipe, gemms)
    _warn_of_copies(cache)
    must_cast = is_first | is_stale(cache, variables["params"])
    return lax.cond(must_cast, lambda _: cast_listed(variables, recipe, gemms), dict, dict(cache))


def outdated(cache: Mapping) -> dict[str, PyTree]:
    """The cache with the complement of its version, so that its next reader casts again."""
    return {**cache, VERSION: ~cache[VERSION]}


def renewed(cache: Mapping, variables: Variables, recipe: Recipe) -> dict[str, PyTree]:
    """A cache of these variables: this one, unless it is stale."""
    return cast_weights(variables, recipe, cache) if cache else {}


def cast_listed(variables: Variables, recipe: Recipe, gemms: Collection[LayerPath]) -> dict[str, PyTree]:
    """`cast_weights` for these GEMMs; {} where there are none."""
    params, fp8_state = variables["params"], variables.get("fp8", {}) if recipe.has_state else {}
    cache = cast_gemms(params, fp8_state, dict.fromkeys(gemms, recipe))
    return {**with_version(cache, params), CAST_BY: CastBy(recipe)} if cache else {}


def with_version(cache: Mapping, params: Mapping) -> dict[str, PyTree]:
    """The cache with the version of these params; {} if it is empty."""
    return {**cache, VERSION: version_of(params, cache)} if cache else {}


def cached_gemms(cache: Mapping) -> list[LayerPath]:
    """The GEMMs whose weights a cache has."""
    return [path for path, _ in cached_weights(cache)]


def gemms_of_recipe(
    variables: Variables, recipe: Recipe, cache: Mapping | None, forward: Callable[[dict], object] | None
) -> list[LayerPath]:
    """The GEMMs whose weights are cast: those of the state; without state those of the cache, or of the forward. Frozen
    weights are left out.
    """
    if recipe.has_state:
        paths: list[LayerPath] = []
        map_gemms_with_path(lambda path, _: paths.append(path), variables["fp8"])
        return [path for path in paths if not is_frozen(variables, path)]
    if cache is not None:
        return cached_gemms(cache)
    if forward is None:
        raise ValueError(
            f"cast_weights must know which layers are in FP8, and {type(recipe).__name__} leaves no trace of them in "
            "the variables, got neither a cache nor forward; pass forward=lambda variables: model.apply(variables, x)"
        )
    with listing() as listed:
        # A new lambda: jax would not trace a function again that it has traced before.
        jax.eval_shape(lambda own: forward(own), variables)
    paths = with_kernels([path for path, gemm in listed.items() if gemm.recipe == recipe], variables["params"])
    if not paths:
        raise ValueError(
            f"forward must run layers with {recipe!r}, whose kernels are among the params by the path of their layer, "
            f"got {len(listed)} other layers in FP8; pass the recipe of the model"
        )
    return paths


def cast_requests(
    cache: Mapping, params: Mapping, fp8_state: Mapping
) -> dict[LayerPath | tuple[LayerPath, ...], tuple[Fp8Pair, Cast]]:
    """For `InPlace`: the weights that an optimizer writes in FP8, and how they are cast, with scales of `fp8_state` or
    with a scale for each square.

    The others are left to `refresh`: layers stacked by `nn.scan`, which have a scale each; recipes that measure a whole
    tensor before its cast; and kernels side by side of which two share a square.
    """
    requests = {}
    for path, pair in cached_weights(cache):
        kernels, arrays = kernel_paths(path), kernels_of(path, params)
        if any(kernel.ndim != 2 for kernel in arrays):
            continue
        cast = _cast_of(cache[CAST_BY].recipe, path, fp8_state)
        if can_be_written(cast.rule, [kernel.shape[1] for kernel in arrays]):
            first, *others = kernels
            requests[kernels if others else first] = pair, cast
    return requests


def refresh(cache: Mapping, params: Mapping, fp8_state: Mapping, updates: PyTree = None) -> dict[str, PyTree]:
    """The cache of new params or scales. Weights that the optimizer has cast are taken from its `updates`; the others
    are cast here.
    """
    if not cache:
        return {}
    leaves = jax.tree_util.tree_leaves_with_path(updates, is_leaf=is_fp8)
    by_kernel = {names_of(path): leaf.cast for path, leaf in leaves if isinstance(leaf, NewParam)}
    written = {path: by_kernel.get(kernel_paths(path)[0]) for path in cached_gemms(cache)}
    recipe = cache[CAST_BY].recipe
    others = [path for path, pair in written.items() if pair is None]
    for path in others:
        _check_has_scale(recipe, path, fp8_state)
    new_cache = cast_gemms(params, fp8_state, {path: recipe for path in others})
    for path, pair in written.items():
        if pair is not None:
            put_at_path(new_cache, path, {"kernel": pair})
    return {**new_cache, VERSION: version_of(params, cache), CAST_BY: cache[CAST_BY]}


def _cast_of(recipe: Recipe, gemm: LayerPath, fp8_state: Mapping) -> Cast:
    """The cast of a kernel, before the kernel is known: a recipe that asks for its amax gets 1."""
    _check_has_scale(recipe, gemm, fp8_state)
    scales = at_path(fp8_state, gemm)["scale"] if recipe.has_state else None
    return recipe.cast(KERNEL, scales, lambda: jnp.float32(1))


def _check_has_scale(recipe: Recipe, gemm: LayerPath, fp8_state: Mapping) -> None:
    state = at_path(fp8_state, gemm)
    if recipe.has_state and (not isinstance(state, Mapping) or "scale" not in state):
        raise ValueError(
            f"the FP8 state must have the scale of {'/'.join(gemm)}, which the weight cache holds, "
            f"got {describe(state)}; pass state and cache of one model, or cache={{}}"
        )


def check_can_be_cast(caller: str, variables: Variables, recipe: RecipeOrRules) -> Recipe:
    """The recipe by which to cast; raise unless the variables are those of a model with this recipe or these rules."""
    check_variables(variables)
    recipe = step_recipe(recipe)
    if recipe is None or "params" not in variables or (recipe.has_state and not variables.get("fp8")):
        raise ValueError(
            f'{caller} needs a recipe and "params", with DelayedScaling also "fp8", of a model with this recipe, '
            f"got {describe(variables)} and {describe(recipe)}; pass what model.init returned"
        )
    return recipe


def _check_cache(cache: Mapping, variables: Variables, recipe: Recipe, gemms: Collection[LayerPath]) -> None:
    expected = jax.eval_shape(lambda: cast_listed(variables, recipe, gemms))
    difference = first_difference(expected, dict(cache))
    if difference is None and jax.tree.structure(expected) != jax.tree.structure(dict(cache)):
        difference = f"it was cast by {cache[CAST_BY].recipe!r}, not by {recipe!r}"
    if difference is not None or not gemms:
        raise ValueError(
            f"cache must be what cast_weights made of this model with this recipe, but {difference or 'it is empty'}; "
            "make it anew with cast_weights(variables, recipe)"
        )


def check_flag(flag: object) -> None:
    """Raise unless this is one truth value, traced or not."""
    dtype, shape = getattr(flag, "dtype", None), getattr(flag, "shape", ())
    if isinstance(flag, bool | np.bool_) or (dtype == jnp.bool_ and shape == ()):
        return
    arrived = f"{type(flag).__name__} {flag!r}" if dtype is None else f"{dtype}{list(shape)}"
    raise ValueError(
        f"is_first_microbatch must be a bool or an array bool[], got {arrived}; pass `i == 0` for microbatch i"
    )


def _warn_of_copies(cache: Mapping) -> None:
    """Warn where a cache is copied: outside jit it cannot be donated."""
    leaves = jax.tree.leaves(cache)
    if not any(isinstance(leaf, Tracer) for leaf in leaves):
        size = sum(leaf.nbytes for leaf in leaves)
        warnings.warn(
            "cast_weights copies the cache it is given when it is called outside jit, "
            f"{size / 2**20:,.1f} MiB a call; call it in a jitted function "
            "that takes the cache with donate_argnums",
            stacklevel=3,
        )

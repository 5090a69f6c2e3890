"""Gradient accumulation over the microbatches of one optimizer step, which share their weights in FP8.

    params, scales ─begin→ pending: weights in FP8, sums at zero
    pending, microbatch ─add_microbatch→ pending            once for each; in the end
                                          its loss and gradients are means, its amaxes maxima

`make_train_step` runs this as a scan within one program, or in pieces that the caller calls. The pieces do not trust
the caller: sums and weights belong to one state, and a microbatch of another state begins a new sum.
"""

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jax_fp8.core.checks import first_difference
from jax_fp8.core.paths import LayerPath, at_path, map_with_names
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.state import no_amaxes
from jax_fp8.core.types import Batch, PyTree
from jax_fp8.grads.gradients import take_gradients
from jax_fp8.grads.tape import Observed, PassResult
from jax_fp8.kernels.explicit import shards_of
from jax_fp8.ops.weight_version import is_stale
from jax_fp8.parallel.mesh import Parallelism
from jax_fp8.parallel.placement import placed_shapes
from jax_fp8.state.checks import check_is
from jax_fp8.state.train_state import TrainState
from jax_fp8.state.weight_cache import cached_gemms, cast_listed, cast_weights


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PendingStep:
    """The sums over the microbatches so far.

    `step` int32[]: the step count of the state that they belong to. `count` int32[]: how many microbatches there were.
    `loss` f32[] and `gradients` (float32, like the params): their shares of the mean over all microbatches. `amaxes`
    f32[rows]: the maxima. `cache`: the weights in FP8, or {}; on a mesh each device's own, stacked
    (distributed/mesh_pass.py).
    """

    step: jax.Array
    count: jax.Array
    loss: jax.Array
    gradients: PyTree
    amaxes: jax.Array
    cache: PyTree


def begin(state: TrainState, recipe: Recipe | None, cast: bool, gemms: Collection[LayerPath] = ()) -> PendingStep:
    """The sums before the first microbatch: zeros.

    With `cast`, the weights are cast here for all microbatches: those that the FP8 state, `gemms` or the state's own
    cache name.
    """
    zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), state.params)
    cache = {}
    if cast and recipe is not None and recipe.has_state:
        cache = cast_weights(state.variables, recipe)
    elif cast and recipe is not None:
        cache = cast_listed(state.variables, recipe, gemms or cached_gemms(state.cache))
    return PendingStep(state.step, jnp.int32(0), jnp.float32(0), zeros, no_amaxes(state.fp8), cache)


def add_microbatch(
    loss_fn: Callable,
    microbatches: int,
    state: TrainState,
    pending: PendingStep,
    microbatch: Batch,
    gemms: Collection[LayerPath] = (),
    observe: Observed = (),
    has_aux: bool = False,
) -> tuple[PendingStep, PassResult]:
    """Run the loss of a microbatch forward and backward, and add its share. Returns the sums, and the result of the
    microbatch's own pass. `gemms` and `observe` are those of `take_gradients`.
    """
    variables = state.variables | ({"fp8_cache": pending.cache} if pending.cache else {})
    add = take_gradients(
        loss_fn, has_aux, observe=observe, gemms=gemms, sums=pending.gradients, weight=1 / microbatches
    )
    result = add(variables, microbatch)
    added = replace(
        pending,
        count=pending.count + 1,
        loss=pending.loss + result.loss.astype(jnp.float32) / microbatches,
        gradients=result.grads,
        amaxes=jnp.maximum(pending.amaxes, result.amaxes),
    )
    return added, result


def begin_if_needed(
    state: TrainState,
    pending: PendingStep,
    is_first_microbatch: bool | jax.Array,
    cast: Callable[[], dict],
    by_gemm: Collection[LayerPath],
    agree: Callable[[jax.Array], jax.Array] = lambda is_stale: is_stale,
) -> PendingStep:
    """The sums at zero for a first microbatch, and where `pending` belongs to another state; else `pending`.

    GEMMs read weights in FP8 and add to sums in place. These arrays go through one conditional, whose other branch does
    nothing. For the others a `where` is enough, since the computations that follow read them anyway.

    Args:
      cast: makes the weights in FP8, if `pending` has any.
      by_gemm: kernels to whose sums the GEMMs add in place.
      agree: turns a device's flag that its weights are of other params into the same flag on all devices.
    """
    fresh = is_first_microbatch | (pending.step != state.step)
    if pending.cache:
        fresh = fresh | agree(is_stale(pending.cache, state.params))

    def clear(large: tuple[PyTree, list[jax.Array]]) -> tuple[PyTree, list[jax.Array]]:
        return cast() if pending.cache else {}, jax.tree.map(jnp.zeros_like, large[1])

    large = pending.cache, [at_path(pending.gradients, kernel) for kernel in by_gemm]
    cache, cleared = lax.cond(fresh, clear, lambda large: large, large)
    cleared = dict(zip(by_gemm, cleared, strict=True))
    sums = map_with_names(
        lambda names, total: cleared[names] if names in cleared else jnp.where(fresh, 0, total), pending.gradients
    )
    small = pending.count, pending.loss, pending.amaxes
    count, loss, amaxes = (jnp.where(fresh, jnp.zeros_like(x), x) for x in small)
    return PendingStep(state.step, count, loss, sums, amaxes, cache)


def shapes_of_pending(parallel: Parallelism, state: TrainState) -> PendingStep:
    """Shapes and places of a `PendingStep` without weights: sums lie where the params do."""
    whole = NamedSharding(parallel.mesh, PartitionSpec())
    numbers = jnp.int32(0), jnp.int32(0), jnp.float32(0), jax.eval_shape(no_amaxes, state.fp8)
    step, count, loss, amaxes = placed_shapes(numbers, (whole,) * 4)
    sums = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=p.sharding), state.params)
    return PendingStep(step, count, loss, sums, amaxes, {})


def of_no_state(state: TrainState) -> jax.Array:
    """The step count of a `PendingStep` whose sums belong to no state."""
    return jnp.full_like(state.step, -1)


def warn_of_copies(pending: PendingStep) -> None:
    """Warn what `accumulate_step` costs where nothing is donated."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(pending))
    warnings.warn(
        f"accumulate_step copies what it adds to, {size / 2**20:,.1f} MiB a microbatch, "
        "because the step was made with donate=False; leave donate=True",
        stacklevel=3,
    )


def is_complete(state: TrainState, pending: PendingStep, microbatches: int) -> jax.Array:
    """Whether the sums hold all microbatches of this state, bool[]."""
    return (pending.count == microbatches) & (pending.step == state.step)


def check_pending(pending: PendingStep, state: TrainState) -> None:
    """Raise unless microbatches of this state can be added to `pending`."""
    check_is("pending", pending, PendingStep, "pass what start, accumulate_step or apply_step returned")
    sums = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), state.params)
    difference = first_difference(sums, pending.gradients)
    if difference is not None:
        raise ValueError(
            f"pending must be of this state, but of its gradients {difference}; pass what start(state) returned"
        )


def split(batch: Batch, microbatches: int) -> Batch:
    """(batch, ...) as (microbatches, batch / microbatches, ...). Microbatch i has the rows i, i + microbatches, ...: so
    rows of a sharded batch stay on their devices.
    """

    def split_leaf(x: jax.Array) -> jax.Array:
        shards, sequences = shards_of(x, 0), x.shape[0] // microbatches
        if sequences % shards:
            raise ValueError(
                f"every device must have whole sequences of each microbatch, got {sequences} of them over {shards} "
                "devices; change the batch size or the number of microbatches"
            )
        return jnp.moveaxis(x.reshape(-1, microbatches, *x.shape[1:]), 1, 0)

    return jax.tree.map(split_leaf, batch)

"""One device's pass over a batch: over the whole batch, or inside the `shard_map` of a mesh over the device's part.

state, batch ─once, or a scan over microbatches→ PassResult(loss, grads, amaxes, ...)
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.paths import LayerPath
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.state import no_amaxes
from jax_fp8.core.types import Batch, PyTree
from jax_fp8.distributed.microbatches import PendingStep, add_microbatch, begin, split
from jax_fp8.grads.gradients import take_gradients
from jax_fp8.grads.loss_aux import joined_microbatches
from jax_fp8.grads.tape import Observed, PassResult, nothing_measured
from jax_fp8.state.train_state import TrainState


@dataclass(frozen=True)
class LocalPass:
    """Fields as in `make_train_step`."""

    recipe: Recipe | None
    microbatches: int
    cache_weights: bool
    has_aux: bool

    def gradients(
        self,
        loss_fn: Callable,
        state_of: Callable[[], TrainState],
        batch: Batch,
        gemms: Collection[LayerPath],
        observe: Observed = (),
    ) -> PassResult:
        """The pass over a batch. Every microbatch calls `state_of()`, which may make the state anew."""
        if self.microbatches == 1:
            return take_gradients(loss_fn, self.has_aux, observe=observe)(state_of().variables, batch)

        def body(
            carry: tuple[PendingStep, jax.Array], microbatch: Batch
        ) -> tuple[tuple[PendingStep, jax.Array], PyTree]:
            pending, measured = carry
            pending, result = add_microbatch(
                loss_fn, self.microbatches, state_of(), pending, microbatch, gemms, observe, self.has_aux
            )
            return (pending, jnp.maximum(measured, result.measured)), result.aux

        state = state_of()
        start = begin(state, self.recipe, self.cache_weights and not state.cache, gemms)
        start = start, nothing_measured(observe)
        (pending, measured), aux = lax.scan(body, start, split(batch, self.microbatches))
        aux = joined_microbatches(aux) if self.has_aux else None
        return PassResult(pending.loss, pending.gradients, pending.amaxes, measured, aux)

    def first_amaxes(
        self, loss_fn: Callable, state_of: Callable[[], TrainState], batch: Batch, _: Collection[LayerPath]
    ) -> jax.Array:
        """The amaxes of a pass in which every tensor is scaled by its own amax."""
        first_pass = take_gradients(loss_fn, self.has_aux, from_current=True)
        if self.microbatches == 1:
            return first_pass(state_of().variables, batch).amaxes

        def largest(amaxes: jax.Array, microbatch: Batch) -> tuple[jax.Array, None]:
            return jnp.maximum(amaxes, first_pass(state_of().variables, microbatch).amaxes), None

        start = no_amaxes(state_of().fp8)
        return lax.scan(largest, start, split(batch, self.microbatches))[0]

"""A pass over a batch as one device makes it: over all of it, or inside the `shard_map` of a mesh over its part.

state, batch ─once, or a scan over microbatches→ loss (and aux), gradients, amaxes
"""

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax

from jax_fp8.core.paths import is_of_experts
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.state import no_amaxes
from jax_fp8.ops.weights import ready_for_loop
from jax_fp8.train.diagnostics import Observed, nothing_beside
from jax_fp8.train.gradients import value_grads_and_amaxes
from jax_fp8.train.loss_aux import joined_microbatches
from jax_fp8.train.microbatches import add_microbatch, begin, split
from jax_fp8.train.weight_cache import cached_gemms


@dataclass(frozen=True)
class LocalPass:
    """Fields as in `make_train_step`."""

    recipe: Recipe | None
    microbatches: int
    cache_weights: bool
    has_aux: bool

    def gradients(self, loss_fn, state_of, batch, gemms, observed: Observed = ()):
        """Loss (and aux), gradients and amaxes of a batch, and behind these how the tensors of `observed` were cast.
        The state of `state_of()` may be made anew for every microbatch.
        """
        if self.microbatches == 1:
            return value_grads_and_amaxes(loss_fn, self.has_aux, observed=observed)(state_of().variables, batch)

        def body(pending, microbatch):
            options = gemms, observed, self.has_aux
            return add_microbatch(loss_fn, self.microbatches, state_of(), pending, microbatch, *options)

        state = state_of()
        start = begin(state, self.recipe, self.cache_weights and not state.cache, gemms)
        start = dataclasses.replace(start, amaxes=nothing_beside(start.amaxes, observed))
        if any(map(is_of_experts, cached_gemms(start.cache or state.cache))):
            start = dataclasses.replace(start, cache=ready_for_loop(start.cache or state.cache, state.params))
        pending, aux = lax.scan(body, start, split(batch, self.microbatches))
        value = (pending.loss, joined_microbatches(aux)) if self.has_aux else pending.loss
        return value, pending.gradients, pending.amaxes

    def first_amaxes(self, loss_fn, state_of, batch, _):
        """The amaxes of a pass in which every tensor is scaled by its own."""
        record = value_grads_and_amaxes(loss_fn, self.has_aux, from_current=True)
        if self.microbatches == 1:
            return record(state_of().variables, batch)[2]

        def largest(amaxes, microbatch):
            return jnp.maximum(amaxes, record(state_of().variables, microbatch)[2]), None

        start = no_amaxes(state_of().fp8)
        return lax.scan(largest, start, split(batch, self.microbatches))[0]

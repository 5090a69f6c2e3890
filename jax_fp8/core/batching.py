"""Amaxes under `jax.vmap`: each example of the batch gets the maximum over all of them.

A scale that the whole batch shares needs the amax of the whole batch. Where the state is mapped too (an ensemble, or
experts with scales of their own), each example keeps its own amaxes.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


@jax.custom_batching.custom_vmap
def shared_amaxes(shared: jax.Array, amaxes: jax.Array) -> jax.Array:
    """`amaxes`; under `jax.vmap` their maximum over the batch, unless `shared`, the array for them, is mapped too."""
    del shared
    return amaxes


@shared_amaxes.def_vmap
def _over_batch(
    axis_size: int, in_batched: Sequence[bool], shared: jax.Array, amaxes: jax.Array
) -> tuple[jax.Array, bool]:
    del axis_size
    is_mapped, is_batched = in_batched
    # Call it again, so that an outer `vmap` applies this rule too. Shapes do not matter to the rule.
    if is_batched and not is_mapped:
        return shared_amaxes(shared, jnp.max(amaxes, axis=0)), False
    return shared_amaxes(shared, amaxes), is_batched

"""Amaxes under `jax.vmap`: what each example saw becomes what all of them saw.

A scale that a batch shares needs the amax of the whole batch. Where the state is mapped too (an ensemble, experts, each
with scales of its own), so are the amaxes.
"""

import jax
import jax.numpy as jnp


@jax.custom_batching.custom_vmap
def shared_amaxes(shared: jax.Array, amaxes: jax.Array) -> jax.Array:
    """`amaxes`; under `jax.vmap` their maximum over the batch, unless `shared`, which takes them, is mapped, too."""
    del shared
    return amaxes


@shared_amaxes.def_vmap
def _over_batch(axis_size, in_batched, shared, amaxes):
    del axis_size
    is_mapped, is_batched = in_batched
    # Once more, as an outer `vmap` wants to know, too. Shapes do not matter to it.
    if is_batched and not is_mapped:
        return shared_amaxes(shared, jnp.max(amaxes, axis=0)), False
    return shared_amaxes(shared, amaxes), is_batched

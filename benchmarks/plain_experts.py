"""A mixture of experts in plain Flax, as a baseline. Each expert has room for its share of the tokens under an even
load.

Products are batched over experts, as cuBLAS can in bfloat16, with the average number of rows of an expert. An expert
that is full drops further tokens, as in the Switch Transformer (https://arxiv.org/abs/2101.03961) with a capacity
factor of 1. So the baseline computes slightly less than a mixture that drops no token. `lax.ragged_dot` would be a
worse baseline: on an H200, XLA multiplies all rows by every expert.

Nothing of jax_fp8 is used here. There is no load-balancing loss; its cost is negligible.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from plain_gpt import COMPUTE


class PlainExperts(nn.Module):
    """Σ weight · down(silu(gate) · up) over each token's experts; input and output are (batch, seq, hidden)."""

    num_experts: int
    experts_per_token: int
    mlp_hidden_size: int
    capacity: float = 1.0

    @nn.compact
    def __call__(self, x):
        tokens, experts = x.reshape(-1, x.shape[-1]), self.num_experts
        logits = nn.Dense(experts, use_bias=False, dtype=jnp.float32, precision="highest", name="router")(tokens)
        weights, chosen = jax.lax.top_k(jax.nn.softmax(logits), self.experts_per_token)
        weights = weights / weights.sum(-1, keepdims=True)
        room = math.ceil(self.capacity * chosen.size / experts)
        token, slot = places(chosen, experts, room)
        rows = tokens.at[token].get(mode="fill", fill_value=0).reshape(experts, room, -1)
        gate, up = jnp.split(self._product(rows, 2 * self.mlp_hidden_size, "gate_up"), 2, axis=-1)
        rows = self._product(nn.silu(gate) * up, x.shape[-1], "down").reshape(experts * room, -1)
        found = rows.at[slot].get(mode="fill", fill_value=0)  # (tokens, experts_per_token, hidden)
        return jnp.einsum("tch,tc->th", found, weights.astype(COMPUTE)).reshape(x.shape)

    def _product(self, rows, features: int, name: str):
        init = nn.initializers.lecun_normal(batch_axis=0)
        kernel = self.param(name, init, (self.num_experts, rows.shape[-1], features), jnp.float32)
        return jnp.einsum("erk,ekn->ern", rows, kernel.astype(COMPUTE))


def places(chosen: jax.Array, experts: int, room: int) -> tuple[jax.Array, jax.Array]:
    """The token of each slot, i32[experts * room], and the slot of each token and choice, i32[tokens, choices]. An
    empty slot has an index beyond the last token, and a dropped choice one beyond the last slot.
    """
    pairs = chosen.reshape(-1)
    order = jnp.argsort(pairs, stable=True)
    counts = jnp.bincount(pairs, length=experts)
    first = jnp.cumsum(counts) - counts
    number = jnp.argsort(order) - first[pairs]  # of a token among those of its expert
    slot = jnp.where(number < room, pairs * room + number, experts * room)
    expert, place = jnp.divmod(jnp.arange(experts * room), room)
    pair = order.at[first[expert] + place].get(mode="clip")
    token = jnp.where(place < counts[expert], pair // chosen.shape[1], chosen.shape[0])
    return token, slot.reshape(chosen.shape)

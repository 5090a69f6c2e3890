"""The router of a mixture of experts: the experts of each token, their weights, and losses that balance their use.

    x ─router─→ logits ─softmax→ probabilities ─top k→ experts of a token, and their weights

All of this is float32: the arrays are small, and near a tie a rounding could send a token to another expert. On a tie
`lax.top_k` takes the expert with the lower number.

Two losses may be added to the training loss. The load-balancing loss (Switch Transformer,
https://arxiv.org/abs/2101.03961, equation 4, here for k choices) is

    experts · Σ_e f_e p_e      f_e: share of tokens and choices that go to e; p_e: mean probability of e

It is 1 where all experts are used evenly, and `experts` where only one is used. Its gradient flows through p_e. The
z-loss (ST-MoE, https://arxiv.org/abs/2202.08906, equation 5) is the mean of logsumexp(logits)², and keeps logits small.
In a step on shards f_e is the share over all devices, so that the mean of the devices' losses is the loss of all
tokens.

Padding goes to no expert: its choices are `experts`, one past the last, its weights are 0, and means leave it out.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.shards import parts_of_batch, sum_over_batch
from jax_fp8.kernels.explicit import einsum
from jax_fp8.kernels.vma import match_vma
from jax_fp8.ops.parameters import ParamInfo

ROUTER_SCOPE = "jax_fp8_router"
EXPERT_SHARES = "expert_shares"  # the measurement f32[experts]: the share of all tokens that each expert gets


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """The choices of a router, and its losses.

    Args:
      experts: i32[tokens, choices]; the number of experts for padding.
      weights: f32[tokens, choices].
      fractions: f32[experts], the share of all tokens and choices that each expert gets.
      balance_loss, z_loss: f32[].
    """

    experts: jax.Array
    weights: jax.Array
    fractions: jax.Array
    balance_loss: jax.Array
    z_loss: jax.Array


def route(
    x: jax.Array,
    kernel: jax.Array,
    choices: int,
    normalize_weights: bool = True,
    is_token: jax.Array | None = None,
) -> Routing:
    """Send tokens `x` (tokens, features) to `choices` experts each, by a kernel f32[features, experts].

    Args:
      normalize_weights: divide the weights of a token by their sum, as Mixtral does; else they are the probabilities.
      is_token: bool[tokens], False for padding; None: no padding.
    """
    experts = kernel.shape[1]
    if not 1 <= choices <= experts:
        raise ValueError(
            f"choices must be from 1 to {experts}, the number of experts, got {choices}; change one of both"
        )
    logits = _logits(*match_vma(x, kernel.astype(jnp.float32)))
    probabilities = jax.nn.softmax(logits)
    _, chosen = lax.top_k(lax.stop_gradient(probabilities), choices)
    # A mask in place of a gather, because the gradient of a gather is a scatter.
    is_chosen = chosen[:, :, None] == jnp.arange(experts, dtype=chosen.dtype)[None, None]
    if is_token is not None:
        chosen = jnp.where(is_token[:, None], chosen, experts)
        is_chosen &= is_token[:, None, None]
    weights = jnp.sum(jnp.where(is_chosen, probabilities[:, None, :], 0), axis=-1)
    if normalize_weights:
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights / (total if is_token is None else jnp.where(is_token[:, None], total, 1))
    fractions = sum_over_batch(_mean(is_chosen, is_token) / choices) / parts_of_batch()
    balance_loss = experts * jnp.sum(fractions * _mean(probabilities, is_token))
    z_loss = _mean(jnp.square(jax.nn.logsumexp(logits, axis=-1)), is_token)
    return Routing(chosen, weights, fractions, balance_loss, z_loss)


def _mean(x: jax.Array, is_token: jax.Array | None) -> jax.Array:
    """The mean over tokens of (tokens, ...), or of the sum over choices of (tokens, choices, ...).

    With padding it is this device's sum over its tokens, divided by the mean number of tokens of a device.
    """
    x = jnp.sum(x, axis=1, dtype=jnp.float32) if x.ndim == 3 else x
    if is_token is None:
        return jnp.mean(x, axis=0)
    tokens = sum_over_batch(jnp.sum(is_token, dtype=jnp.float32)) / parts_of_batch()
    of_tokens = jnp.where(lax.expand_dims(is_token, range(1, x.ndim)), x, 0)
    return jnp.sum(of_tokens, axis=0) / jnp.where(tokens > 0, tokens, 1)


@jax.custom_vjp
def _logits(
    x: jax.Array, kernel: jax.Array
) -> jax.Array:  # (tokens, features), f32[features, experts] -> f32[tokens, experts]
    return _product("t h, h e -> t e", x, kernel)


def _logits_forward(x: jax.Array, kernel: jax.Array):
    return _logits(x, kernel), (x, kernel)  # x in its own dtype: float32 would have twice the bytes


def _logits_backward(kept: tuple[jax.Array, jax.Array], dlogits: jax.Array):
    x, kernel = kept
    dx, dkernel = _product("t e, h e -> t h", dlogits, kernel), _product("t h, t e -> h e", x, dlogits)
    return ParamInfo.from_arrays(x).place(dx.astype(x.dtype)), ParamInfo.from_arrays(kernel).place(dkernel)


_logits.defvjp(_logits_forward, _logits_backward)


def _product(rule: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """In full float32: by default a GPU rounds the factors to TF32, 10 bits of mantissa."""
    with jax.named_scope(ROUTER_SCOPE), jax.default_matmul_precision("highest"):
        return einsum(rule, a.astype(jnp.float32), b.astype(jnp.float32))

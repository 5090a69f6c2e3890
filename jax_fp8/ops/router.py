"""Which experts a token goes to, how much each of them counts, and what keeps experts alike in use.

    x ─router─→ logits ─softmax→ probabilities ─top k→ experts of a token, and their weights

All of this is float32: it is small, and near ties a rounding would send a token elsewhere. Ties go to the expert with
the lower number, as `lax.top_k` has it.

Two losses may be added to the training loss. The load-balancing loss (Switch Transformer,
https://arxiv.org/abs/2101.03961, equation 4, here for k choices) is

    experts · Σ_e f_e p_e      f_e: share of tokens and choices that go to e; p_e: mean probability of e

1 where experts are used evenly, and `experts` where one is used alone. Its gradient flows through p_e. The z-loss
(ST-MoE, https://arxiv.org/abs/2202.08906, equation 5) is the mean of logsumexp(logits)², and keeps logits small. In a
step on shards, f_e is of all devices, so that the mean of the devices' losses is the loss of all tokens.

Padding goes to no expert: its choices are `experts`, the number behind the last one, its weights are 0, and means are
over the other tokens.
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
    """What a router says of tokens, and of its own work.

    Args:
      experts: i32[tokens, choices]; of padding the number behind the last one.
      weights: f32[tokens, choices].
      fractions: f32[experts], the share of all tokens and choices that an expert gets.
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
      is_token: bool[tokens], False of padding; None is all.
    """
    experts = kernel.shape[1]
    if not 1 <= choices <= experts:
        raise ValueError(f"a token goes to 1 to {experts} experts, all that there are, got {choices}; change one")
    logits = _logits(*match_vma(x, kernel.astype(jnp.float32)))
    probabilities = jax.nn.softmax(logits)
    _, chosen = lax.top_k(lax.stop_gradient(probabilities), choices)
    # Choices, and no gather, whose gradient would be a scatter.
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


def _mean(x, is_token) -> jax.Array:
    """Over tokens, of (tokens, [choices,] ...) the sum of choices; where some are padding, this device's share of the
    mean over the tokens of all devices, times their number.
    """
    x = jnp.sum(x, axis=1, dtype=jnp.float32) if x.ndim == 3 else x
    if is_token is None:
        return jnp.mean(x, axis=0)
    tokens = sum_over_batch(jnp.sum(is_token, dtype=jnp.float32)) / parts_of_batch()
    of_tokens = jnp.where(lax.expand_dims(is_token, range(1, x.ndim)), x, 0)
    return jnp.sum(of_tokens, axis=0) / jnp.where(tokens > 0, tokens, 1)


@jax.custom_vjp
def _logits(x, kernel):  # (tokens, features), f32[features, experts] -> f32[tokens, experts]
    return _product("t h, h e -> t e", x, kernel)


def _logits_forward(x, kernel):
    return _logits(x, kernel), (x, kernel)  # x as it is, and not in float32, which has twice the bytes


def _logits_backward(kept, dlogits):
    x, kernel = kept
    dx, dkernel = _product("t e, h e -> t h", dlogits, kernel), _product("t h, t e -> h e", x, dlogits)
    return ParamInfo.of(x).place(dx.astype(x.dtype)), ParamInfo.of(kernel).place(dkernel)


_logits.defvjp(_logits_forward, _logits_backward)


def _product(rule, a, b) -> jax.Array:
    """In float32 proper: by default a GPU rounds the factors to 10 bits."""
    with jax.named_scope(ROUTER_SCOPE), jax.default_matmul_precision("highest"):
        return einsum(rule, a.astype(jnp.float32), b.astype(jnp.float32))

"""The router of a mixture of experts: the experts of each token, their weights, and losses that balance their use.

    x ─router─→ logits ─softmax or sigmoid→ scores ─top k of scores + bias→ experts of a token
                                               └── of these experts ──────→ their weights

All of this is float32: the arrays are small, and near a tie a rounding could send a token to another expert. On a tie
`lax.top_k` takes the expert with the lower number.

Two losses may be added to the training loss. The load-balancing loss (Switch Transformer,
https://arxiv.org/abs/2101.03961, equation 4, here for k choices) is

    experts · Σ_e f_e p_e      f_e: share of tokens and choices that go to e; p_e: mean share of e in the scores

It is 1 where all experts are used evenly, and `experts` where only one is used. Its gradient flows through p_e. The
z-loss (ST-MoE, https://arxiv.org/abs/2202.08906, equation 5) is the mean of logsumexp(logits)², and keeps logits small.
In a step on shards f_e is the share over all devices, so that the mean of the devices' losses is the loss of all
tokens.

A correction bias balances without a loss (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.1.2). It is added to
the scores where experts are chosen, and to no weight. No loss has a gradient for it. In its place the backward returns
how far f_e is above its mean, times 2⁻²⁰, of which each device has its share: such gradients add up over microbatches
and devices as all others do, only their sign counts (`balance_experts`), and next to other gradients they vanish in a
global norm.

Padding goes to no expert: its choices are `experts`, one past the last, its weights are 0, and means leave it out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.checks import check_integer, check_number
from jax_fp8.core.shards import TensorParallel, parts_of_batch, sum_over_batch
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.explicit import einsum
from jax_fp8.kernels.vma import match_vma, vary, varying_axes
from jax_fp8.ops.collectives import leave
from jax_fp8.ops.parameters import ParamInfo

ROUTER_SCOPE = "jax_fp8_router"
# The measurement f32[experts + 2] of all tokens: the share of each expert, and OF_ALL_EXPERTS.
EXPERT_USE, OF_ALL_EXPERTS = "expert_use", ("dropped", "entropy")
SCORES = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}
LEAST_TOTAL = 1e-18  # added to a sum of weights, as DeepSeek adds 1e-20, whose square float32 does not have
LOAD_GRADIENT = 2.0**-20
FIELDS = {
    "choices": "experts_per_token",
    "scores": "router_scores",
    "normalize_weights": "normalize_router_weights",
    "scale": "router_scale",
    "groups": "expert_groups",
    "groups_per_token": "groups_per_token",
    "group_score_experts": "group_score_experts",
}  # of a `RouterRule`, and what layers and configs call them


@dataclass(frozen=True)
class RouterRule:
    """How experts are chosen and weighted.

    Args:
      choices: experts of a token.
      scores: "softmax" over all experts, or "sigmoid" of each.
      normalize_weights: divide the weights of a token by their sum; else they are the scores.
      scale: by which the weights are multiplied at last.
      groups: the experts are so many groups of neighbours; a token chooses groups first, then experts in these.
      groups_per_token: how many groups it chooses.
      group_score_experts: the score of a group is the sum of the scores of so many of its best experts.
    """

    choices: int
    scores: str = "softmax"
    normalize_weights: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    group_score_experts: int = 2

    @classmethod
    def from_fields(cls, fields: Mapping[str, PyTree]) -> "RouterRule":
        """The rule of these fields of a layer or a config, by their names there."""
        return cls(**{own: fields[name] for own, name in FIELDS.items()})

    def check(self, experts: int, prefix: str = "") -> None:
        """Raise unless a router with so many experts can follow this rule. `prefix` begins the names of fields."""
        check_integer(f"{prefix}experts_per_token", self.choices)
        if self.choices > experts:
            raise ValueError(
                f"{prefix}experts_per_token must be at most num_experts, got {self.choices} of {experts}; change one "
                "of them"
            )
        if self.scores not in SCORES:
            raise ValueError(f'{prefix}router_scores must be "softmax" or "sigmoid", got {self.scores!r}')
        check_number(f"{prefix}router_scale", self.scale, "above 0", lambda scale: scale > 0)
        check_integer(f"{prefix}expert_groups", self.groups)
        if experts % self.groups:
            raise ValueError(
                f"{prefix}expert_groups must divide num_experts, got {self.groups} groups of {experts} experts; change "
                "one of them"
            )
        size = experts // self.groups
        check_integer(f"{prefix}groups_per_token", self.groups_per_token, most=self.groups)
        check_integer(f"{prefix}group_score_experts", self.group_score_experts)
        if self.groups > 1 and self.group_score_experts > size:
            raise ValueError(
                f"{prefix}group_score_experts must be at most the {size} experts of a group, got "
                f"{self.group_score_experts}; change it or expert_groups"
            )
        if self.choices > self.groups_per_token * size:
            raise ValueError(
                f"{prefix}experts_per_token must be at most {self.groups_per_token * size}, the experts of "
                f"groups_per_token={self.groups_per_token} groups, got {self.choices}; change one of them"
            )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """The choices of a router, and its losses.

    Args:
      experts: i32[tokens, choices]; the number of experts for padding.
      weights: f32[tokens, choices].
      fractions: f32[experts], the share of all tokens and choices that each expert gets.
      balance_loss, z_loss: f32[].
      entropy: f32[], the mean over all tokens of the entropy of their scores, of which 1 is the most there can be: all
        experts alike. It has no gradient.
    """

    experts: jax.Array
    weights: jax.Array
    fractions: jax.Array
    balance_loss: jax.Array
    z_loss: jax.Array
    entropy: jax.Array


def route(
    x: jax.Array,
    kernel: jax.Array,
    rule: RouterRule,
    bias: jax.Array | None = None,
    is_token: jax.Array | None = None,
    tensor: TensorParallel | None = None,
) -> Routing:
    """Send tokens `x` (tokens, features) to experts, by a kernel f32[features, experts].

    Args:
      bias: f32[experts], added to the scores where experts are chosen; None adds nothing.
      is_token: bool[tokens], False for padding; None: no padding.
      tensor: with sequence parallelism these are this device's own tokens, and the losses are those of the tokens of
        all devices of the axis.
    """
    mean = partial(_mean, is_token=is_token, tensor=tensor if tensor is not None and tensor.sequence else None)
    experts = kernel.shape[1]
    rule.check(experts)
    logits = router_logits(*match_vma(x, kernel.astype(jnp.float32)))
    scores = SCORES[rule.scores](logits)
    chosen = _choose(lax.stop_gradient(scores), None if bias is None else lax.stop_gradient(bias), rule)
    # A mask in place of a gather, because the gradient of a gather is a scatter.
    is_chosen = chosen[:, :, None] == jnp.arange(experts, dtype=chosen.dtype)[None, None]
    if is_token is not None:
        chosen = jnp.where(is_token[:, None], chosen, experts)
        is_chosen &= is_token[:, None, None]
    weights = jnp.sum(jnp.where(is_chosen, scores[:, None, :], 0), axis=-1)
    if rule.normalize_weights:
        total = jnp.sum(weights, axis=-1, keepdims=True) + LEAST_TOTAL
        weights = weights / (total if is_token is None else jnp.where(is_token[:, None], total, 1))
    if rule.scale != 1:
        weights = weights * rule.scale
    fractions = sum_over_batch(mean(is_chosen) / rule.choices) / parts_of_batch()
    if bias is not None:
        shares_of_load = parts_of_batch() * (tensor.size if tensor is not None and tensor.sequence else 1)
        weights = _with_load(weights, bias, (fractions - jnp.mean(fractions)) / shares_of_load)
    shares = scores
    if rule.scores == "sigmoid":
        shares = scores / (jnp.sum(scores, axis=-1, keepdims=True) + LEAST_TOTAL)
    balance_loss = experts * jnp.sum(fractions * mean(shares))
    z_loss = mean(jnp.square(jax.nn.logsumexp(logits, axis=-1)))
    entropy = sum_over_batch(mean(_entropy(lax.stop_gradient(shares)))) / parts_of_batch()
    return Routing(chosen, weights, fractions, balance_loss, z_loss, entropy)


def _entropy(shares: jax.Array) -> jax.Array:
    """Of each row (tokens, experts), in units of the largest."""
    terms = jnp.where(shares > 0, shares * jnp.log(jnp.where(shares > 0, shares, 1)), 0)
    return -jnp.sum(terms, axis=-1) / math.log(max(shares.shape[-1], 2))


def _choose(scores: jax.Array, bias: jax.Array | None, rule: RouterRule) -> jax.Array:
    """i32[tokens, choices]: the experts with the highest scores, in the groups with the highest scores."""
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    if rule.groups_per_token < rule.groups:
        tokens, experts = scores.shape
        of_groups = scores.reshape(tokens, rule.groups, experts // rule.groups)
        group_scores = jnp.sum(lax.top_k(of_groups, rule.group_score_experts)[0], axis=-1)
        _, groups = lax.top_k(group_scores, rule.groups_per_token)
        is_open = jnp.any(groups[:, :, None] == jnp.arange(rule.groups, dtype=groups.dtype)[None, None], axis=1)
        scores = jnp.where(is_open[:, :, None], of_groups, -jnp.inf).reshape(tokens, experts)
    return lax.top_k(scores, rule.choices)[1]


@jax.custom_vjp
def _with_load(weights: jax.Array, bias: jax.Array, excess: jax.Array) -> jax.Array:
    """`weights`; the backward gives the bias f32[experts] the load `excess` f32[experts] for its gradient."""
    return weights


def _with_load_forward(weights: jax.Array, bias: jax.Array, excess: jax.Array):
    load = (excess * LOAD_GRADIENT).astype(bias.dtype)
    return weights, (vary(load, varying_axes(bias)), ParamInfo.from_arrays(bias))


def _with_load_backward(kept: tuple[jax.Array, ParamInfo], dweights: jax.Array):
    load, like = kept
    return dweights, like.place(load), None


_with_load.defvjp(_with_load_forward, _with_load_backward)


def _mean(x: jax.Array, is_token: jax.Array | None, tensor: TensorParallel | None) -> jax.Array:
    """The mean over tokens of (tokens, ...), or of the sum over choices of (tokens, choices, ...); with `tensor` over
    the tokens of all of its devices, of which each has a part of the gradient.

    With padding it is the sum over these tokens, divided by the mean number of tokens of a part of the batch.
    """
    x = jnp.sum(x, axis=1, dtype=jnp.float32) if x.ndim == 3 else x
    total = (lambda x: x) if tensor is None else partial(leave, tensor=replace(tensor, sequence=False))
    if is_token is None:
        return total(jnp.mean(x, axis=0) / (1 if tensor is None else tensor.size))
    tokens = sum_over_batch(total(jnp.sum(is_token, dtype=jnp.float32))) / parts_of_batch()
    of_tokens = jnp.where(lax.expand_dims(is_token, range(1, x.ndim)), x, 0)
    return total(jnp.sum(of_tokens, axis=0)) / jnp.where(tokens > 0, tokens, 1)


@jax.custom_vjp
def router_logits(
    x: jax.Array, kernel: jax.Array
) -> jax.Array:  # (tokens, features), f32[features, experts] -> f32[tokens, experts]
    """`x @ kernel` in float32.

    A product of two bfloat16 numbers is exact in float32, and a float32 number is the sum of three bfloat16 ones. So
    bfloat16 tokens are multiplied on the tensor cores, by three pieces of the kernel side by side. Only their sums
    round a little more than in float32, which would take three times as long: of 2,048 features, logits are off by
    2.6e-6 of the largest instead of 1.9e-6. The gradient of the tokens leaves out products below 2**-24 of the largest.
    """
    if x.dtype != jnp.bfloat16:
        return _product("t h, h e -> t e", x, kernel)
    return _sum(_product("t h, h p e -> t p e", x, _side_by_side(_pieces(kernel))))


def _router_logits_forward(x: jax.Array, kernel: jax.Array):
    return router_logits(x, kernel), (x, kernel)  # x in its own dtype: float32 would have twice the bytes


def _router_logits_backward(kept: tuple[jax.Array, jax.Array], dlogits: jax.Array):
    x, kernel = kept
    if x.dtype == jnp.bfloat16:
        of_dlogits, of_kernel = _pieces(dlogits), _pieces(kernel)
        dkernel = _sum(_product("t h, t p e -> h p e", x, _side_by_side(of_dlogits)))
        pairs = [(of_dlogits[i], of_kernel[j]) for i in range(PIECES) for j in range(PIECES - i)]
        dx = _product("t p e, h p e -> t h", *map(_side_by_side, zip(*pairs, strict=True)))
    else:
        dx, dkernel = _product("t e, h e -> t h", dlogits, kernel), _product("t h, t e -> h e", x, dlogits)
    return ParamInfo.from_arrays(x).place(dx.astype(x.dtype)), ParamInfo.from_arrays(kernel).place(dkernel)


router_logits.defvjp(_router_logits_forward, _router_logits_backward)

PIECES = 3  # of a float32 number: 24 bits, where bfloat16 has 8


def _pieces(x: jax.Array) -> list[jax.Array]:
    """Arrays in bfloat16 whose sum is `x` in float32, the largest first."""
    pieces = []
    for _ in range(PIECES):
        # A cast there and back the compiler may leave out.
        piece = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        pieces.append(piece.astype(jnp.bfloat16))
        x = x - piece
    return pieces


def _side_by_side(pieces: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack(pieces, axis=1)


def _sum(products: jax.Array) -> jax.Array:
    """The sum of the products with pieces (a, pieces, b), the small ones first."""
    return products[:, 0] + (products[:, 1] + products[:, 2])


def _product(rule: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """In float32. By default a GPU rounds factors in float32 to TF32, 10 bits of mantissa."""

    def in_float32(a: jax.Array, b: jax.Array) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            return einsum(rule, a.astype(jnp.float32), b.astype(jnp.float32))

    with jax.named_scope(ROUTER_SCOPE):
        if a.dtype == b.dtype == jnp.bfloat16:  # XLA's CPU does not multiply such matrices into float32
            return lax.platform_dependent(a, b, cuda=partial(einsum, rule, dtype=jnp.float32), default=in_float32)
        return in_float32(a, b)

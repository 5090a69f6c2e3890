"""One step of Adam on one leaf in `jnp`: the reference of the kernel, bit for bit.

    g = grad_scale g            (L2 mode: g = g + weight_decay p)
    m = b1 m + (1 - b1) g       v = b2 v + (1 - b2) g²
    u = (m correction1) / (sqrt(v correction2) + eps)      (AdamW mode: u = u + weight_decay p)
    p = p - rate u

All in float32 (https://arxiv.org/abs/1412.6980, https://arxiv.org/abs/1711.05101), and every operation rounds. The GPU
keeps subnormal numbers; XLA's CPU compiler flushes them to zero.

`p` is the master where it rounds to the param. In elements where it does not, somebody has loaded or edited the param,
and `p` is the param: a step starts from the weights that the model used.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.adam_arrays import Coefficients, Leaf
from jax_fp8.kernels.amax import amax_reference
from jax_fp8.kernels.casting import quantize_reference
from jax_fp8.kernels.draws import Place, draws_of, index_of
from jax_fp8.kernels.storage import (
    REMAINDER,
    master_of,
    off_the_tie,
    quantize_at_random,
    quantize_root,
    remainder_of,
    round_at_random,
    rounds_to,
)


def rounds_at_random(*moments: jax.Array | Fp8Array) -> bool:
    """Whether a moment has fewer bits than the float32 that it is computed in."""
    return any(moment.dtype != jnp.float32 for moment in moments)


def adam_leaf(
    leaf: Leaf,
    coefficients: Coefficients,
    seed: jax.Array,
    number: jax.typing.ArrayLike,
    adam_w_mode: bool,
    whereabouts: Place | None = None,
) -> tuple[Leaf, jax.Array]:
    """The reference: the updated leaf (`number` in the tree), and the update of a float32 param, `-rate u`.
    Of a shard, `whereabouts` says where in the leaf it lies.
    """
    c = coefficients
    g = _rounded(leaf.gradient.astype(jnp.float32) * c.grad_scale)
    p = _master(leaf)
    if leaf.decays and not adam_w_mode:
        g = g + _rounded(p * c.weight_decay)
    m = _rounded(c.b1 * _first_moment(leaf.mu)) + _rounded(c.one_minus_b1 * g)
    v = _rounded(c.b2 * _second_moment(leaf.nu)) + _rounded(c.one_minus_b2 * (g * g))
    u = (m * c.correction1) / (jnp.sqrt(v * c.correction2) + c.eps)
    if leaf.decays and adam_w_mode:
        u = u + _rounded(p * c.weight_decay)
    update = -_rounded(c.rate * u)
    p = p + update
    draws = None, None
    if rounds_at_random(leaf.mu, leaf.nu):
        draws = draws_of(index_of(leaf.gradient, whereabouts), seed, number)
    updated = _store(leaf, m, v, p, *draws)
    if leaf.cast is not None:
        weight = updated.master if updated.param is None else updated.param
        old, old_t, _, _ = leaf.cast.arrays
        values = quantize_reference(weight, old.dtype, leaf.scale)
        values_t = None if old_t is None else values.T
        updated = replace(updated, cast=Fp8Pair.with_shared_scale(values, values_t, leaf.scale, amax_reference(weight)))
    unchanged = c.apply == 0
    updated = jax.tree.map(lambda old, new: jnp.where(unchanged, old, new), leaf, updated)
    return updated, jnp.where(unchanged, -jnp.float32(0), update)


def _store(leaf: Leaf, m: jax.Array, v: jax.Array, p: jax.Array, nu_draw: PyTree, mu_draw: PyTree) -> Leaf:
    """The leaf with new numbers, each rounded to its dtype; the cast is not written here."""
    kept = None if leaf.master is None else leaf.master.dtype
    if leaf.param is not None and leaf.param.dtype == jnp.bfloat16 and kept != jnp.float16:
        p = off_the_tie(p)
    if kept is None:
        param, master = p, None
    elif kept == REMAINDER:
        param, master = p.astype(jnp.bfloat16), remainder_of(p)
    else:
        master = p.astype(kept)
        param = None if leaf.param is None else master.astype(leaf.param.dtype)
    if isinstance(leaf.mu, Fp8Array):
        mu = Fp8Array(quantize_at_random(m, leaf.mu.dtype, leaf.mu_scale, mu_draw), leaf.mu_scale)
    else:
        mu = m if leaf.mu.dtype == jnp.float32 else round_at_random(m, mu_draw)
    if isinstance(leaf.nu, Fp8Array):
        nu = Fp8Array(quantize_root(v, leaf.nu.dtype, leaf.nu_scale, nu_draw), leaf.nu_scale)
    else:
        nu = v if leaf.nu.dtype == jnp.float32 else round_at_random(v, nu_draw, never_zero=True)
    return replace(leaf, mu=mu, nu=nu, param=param, master=master)


def _master(leaf: Leaf):
    """`p` before the step: the master, or the param in elements where the master does not round to it."""
    if leaf.master is None:
        return leaf.param
    if leaf.master.dtype == REMAINDER:
        return master_of(leaf.param, leaf.master)
    master = leaf.master.astype(jnp.float32)
    if leaf.param is None:
        return master
    return jnp.where(rounds_to(leaf.master, leaf.param), master, leaf.param.astype(jnp.float32))


def _first_moment(mu: jax.Array | Fp8Array):
    return mu.dequantize() if isinstance(mu, Fp8Array) else mu.astype(jnp.float32)


def _second_moment(nu: jax.Array | Fp8Array):
    return jnp.square(nu.dequantize()) if isinstance(nu, Fp8Array) else nu.astype(jnp.float32)


def _rounded(product: jax.Array):
    """A product rounded to float32. A compiler may fuse it with a following sum into an FMA, which rounds once; the
    selection prevents that."""
    return jnp.where(product == product, product, np.float32(np.nan))

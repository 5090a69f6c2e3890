"""The scales with which a step writes moments in FP8.

A kernel that writes moments must know their scale before it has computed them. So the scale follows from bounds: from
the largest gradient, and from the largest number that the moment could hold with the scale of the step before.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.formats import fp8_max
from jax_fp8.core.fp8_array import Fp8Array, is_fp8
from jax_fp8.core.scale import scale_from_amax
from jax_fp8.kernels.adam_arrays import Coefficients, Leaf
from jax_fp8.kernels.amax import amax
from jax_fp8.kernels.storage import REMAINDER
from jax_fp8.optim.adam_state import Param

MORE_THAN_ROUNDING = np.float32(1 + 2.0**-7)  # rounding to bfloat16 changes a number by a smaller factor


def with_moment_scales(leaf: Leaf, param: Param, coefficients: Coefficients, l2: bool) -> Leaf:
    """The leaf of a param with scales for its moments that are large enough for every element. `l2`: weight decay is a
    part of the gradient.
    """
    if not (is_fp8(leaf.mu) or is_fp8(leaf.nu)):
        return leaf
    largest = amax(leaf.gradient) * jnp.abs(coefficients.grad_scale)
    if leaf.decays and l2:
        largest = largest + jnp.abs(coefficients.weight_decay) * _largest_weight(param, leaf.master)
    if isinstance(leaf.mu, Fp8Array):
        leaf = replace(leaf, mu_scale=_first_moment_scale(leaf.mu, largest, coefficients))
    if isinstance(leaf.nu, Fp8Array):
        leaf = replace(leaf, nu_scale=_second_moment_scale(leaf.nu, largest, coefficients))
    return leaf


def _largest_weight(param: Param, master: jax.Array | None) -> jax.Array:
    """A bound f32[] of all masters. Where somebody changed a param, the param is the master, and `master` is stale; so
    the bound counts the params if they are much larger.
    """
    if isinstance(param, Fp8Array):
        assert master is not None, "as Storage.check has seen"
        return amax(master)  # `with_own_master` has already put changed values into it
    if master is None:
        return amax(param)
    param_bound = amax(param) * MORE_THAN_ROUNDING  # a master is at most this much larger than its rounded param
    if master.dtype == REMAINDER:
        return param_bound
    largest_master = amax(master)
    return jnp.where(param_bound > largest_master * MORE_THAN_ROUNDING**2, param_bound, largest_master)


def _first_moment_scale(mu: Fp8Array, largest: jax.Array, c: Coefficients) -> jax.Array:
    """The scale for the largest number that b1 mu + (1 - b1) g can be."""
    return scale_from_amax(c.b1 * (mu.scale * fp8_max(mu.dtype)) + c.one_minus_b1 * largest, mu.dtype)


def _second_moment_scale(nu: Fp8Array, largest: jax.Array, c: Coefficients) -> jax.Array:
    """The scale for the largest root that b2 nu + (1 - b2) g² can have; in FP8 `nu` holds the root."""
    squared = c.b2 * jnp.square(nu.scale * fp8_max(nu.dtype)) + c.one_minus_b2 * jnp.square(largest)
    return scale_from_amax(jnp.sqrt(squared), nu.dtype)

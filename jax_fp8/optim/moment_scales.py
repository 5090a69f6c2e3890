"""The scales that moments in FP8 are written with: known before the step, from the largest gradient."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_fp8.core.formats import fp8_max
from jax_fp8.core.fp8_array import is_fp8
from jax_fp8.core.scale import scale_from_amax
from jax_fp8.kernels.adam_arrays import Coefficients, Leaf
from jax_fp8.kernels.amax import amax
from jax_fp8.kernels.storage import REMAINDER

MORE_THAN_ROUNDING = np.float32(1 + 2.0**-7)  # bfloat16 changes a number by less


def with_moment_scales(leaf: Leaf, param: Any, coefficients: Coefficients, l2: bool) -> Leaf:
    """The leaf of a param with the scales of its moments, which no element exceeds. `l2`: weight decay is a part of the
    gradient.
    """
    if not (is_fp8(leaf.mu) or is_fp8(leaf.nu)):
        return leaf
    largest = amax(leaf.gradient) * jnp.abs(coefficients.grad_scale)
    if leaf.decays and l2:
        largest = largest + jnp.abs(coefficients.weight_decay) * _largest_weight(param, leaf.master)
    if is_fp8(leaf.mu):
        leaf = replace(leaf, mu_scale=_first_moment_scale(leaf.mu, largest, coefficients))
    if is_fp8(leaf.nu):
        leaf = replace(leaf, nu_scale=_second_moment_scale(leaf.nu, largest, coefficients))
    return leaf


def _largest_weight(param, master):
    """What no master exceeds, of which some may be params that somebody has changed."""
    if master is None or is_fp8(param):
        return amax(param if master is None else master)
    of_params = amax(param) * MORE_THAN_ROUNDING
    if master.dtype == REMAINDER:
        return of_params
    of_masters = amax(master)
    return jnp.where(of_params > of_masters * MORE_THAN_ROUNDING**2, of_params, of_masters)


def _first_moment_scale(mu, largest, c):
    """The scale that no element of b1 mu + (1 - b1) g can exceed."""
    return scale_from_amax(c.b1 * (mu.scale * fp8_max(mu.dtype)) + c.one_minus_b1 * largest, mu.dtype)


def _second_moment_scale(nu, largest, c):
    """The same for the root of b2 nu + (1 - b2) g²."""
    squared = c.b2 * jnp.square(nu.scale * fp8_max(nu.dtype)) + c.one_minus_b2 * jnp.square(largest)
    return scale_from_amax(jnp.sqrt(squared), nu.dtype)

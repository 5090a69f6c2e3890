"""From an amax to a scale: the one formula, `scale = amax * 2**margin / fp8_max`, and its current-scaling form."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8.core.formats import fp8_max
from jax_fp8.core.recipe import CurrentScaling

SMALLEST_SCALE = np.float32(2.0**-126)  # from here on to 2**126, scale and 1 / scale are normal float32 numbers
LARGEST_SCALE = np.float32(2.0**126)


def scale_from_amax(amax: jax.Array, dtype: jax.typing.DTypeLike, margin: int = 0) -> jax.Array:
    """`amax * 2**margin / fp8_max(dtype)`, float32, within 2**-126 and 2**126; 1 where the amax is 0 or not finite."""
    valid = (amax > 0) & jnp.isfinite(amax)
    # A constant divisor would be compiled into a multiplication by its reciprocal, which rounds differently; a selected one divides.
    numerator = jnp.where(valid, amax * np.float32(2.0**margin), np.float32(1))
    divisor = jnp.where(valid, fp8_max(dtype), np.float32(1))
    return jnp.clip(lax.div(numerator, divisor), SMALLEST_SCALE, LARGEST_SCALE)


def current_scale(amax: jax.Array, dtype: jax.typing.DTypeLike, recipe) -> jax.Array:
    """The scale of a tensor from its own amax. `recipe` may also be a delayed one, whose first, warm-starting pass scales this way."""
    if not isinstance(recipe, CurrentScaling):
        return scale_from_amax(amax, dtype, recipe.margin)
    scale = scale_from_amax(jnp.maximum(amax, np.float32(recipe.amax_epsilon)), dtype)
    return _power_of_two_at_least(scale) if recipe.power_2_scale else scale


def _power_of_two_at_least(scale):
    """Rounding 1/scale down to a power of two is rounding scale up to one: add one to the exponent unless the mantissa is empty."""
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).astype(jnp.uint32)
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)

"""From an amax to a scale: `scale = amax * 2**margin / fp8_max`, and the variants of it that the kernels know."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jax_fp8.core.checks import ARRAYS, check_number
from jax_fp8.core.formats import fp8_max

SMALLEST_SCALE = np.float32(2.0**-126)  # from here on to 2**126, scale and 1 / scale are normal float32 numbers
LARGEST_SCALE = np.float32(2.0**126)


def scale_from_amax(amax: jax.Array, dtype: jax.typing.DTypeLike, margin: int = 0) -> jax.Array:
    """`amax * 2**margin / fp8_max(dtype)`, float32, within 2**-126 and 2**126; 1 where the amax is 0 or not finite."""
    valid = (amax > 0) & jnp.isfinite(amax)
    # XLA compiles a division by a constant into a multiplication by its reciprocal, which rounds differently. A divisor
    # that a select chooses is no constant.
    numerator = jnp.where(valid, amax * np.float32(2.0**margin), np.float32(1))
    divisor = jnp.where(valid, fp8_max(dtype), np.float32(1))
    return jnp.clip(lax.div(numerator, divisor), SMALLEST_SCALE, LARGEST_SCALE)


def check_scale(scale: object) -> None:
    """Raise unless `scale` and `1 / scale` are positive, normal numbers. A traced scale is unknown, and not checked."""
    is_known = not isinstance(scale, Tracer) and getattr(scale, "is_fully_addressable", True)
    if is_known and isinstance(scale, ARRAYS) and scale.ndim == 0:
        scale = float(scale)
    if is_known and not isinstance(scale, ARRAYS):
        wanted = "between 2**-126 and 2**126"
        check_number("scale", scale, wanted, lambda known: 2.0**-126 <= known <= 2.0**126, "pass amax / fp8_max")


@dataclass(frozen=True)
class ScaleFormula:
    """The scale of a tensor from its own amax, `formula(amax, dtype)`, as the kernels too compute it.

    Args:
      margin: powers of two of headroom, as in `scale_from_amax`.
      amax_epsilon: smallest amax a scale is computed from.
      power_2_scale: round the multiplier `1 / scale` down to a power of two.
    """

    margin: int = 0
    amax_epsilon: float = 0.0
    power_2_scale: bool = False

    def __call__(self, amax: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        scale = scale_from_amax(jnp.maximum(amax, np.float32(self.amax_epsilon)), dtype, self.margin)
        return _power_of_two_at_least(scale) if self.power_2_scale else scale


def _power_of_two_at_least(scale: jax.Array) -> jax.Array:
    """1/scale rounded down to a power of two is scale rounded up: add 1 to the exponent unless the mantissa is 0."""
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).astype(jnp.uint32)
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)

"""Numbers that the optimizer stores in fewer bits than it computes with: masters as 16 bits beside a bfloat16 param,
and moments in 16 or 8 bits.

A float32 master is stored as its param, rounded to bfloat16, and 16 more bits, the `remainder`. Rounding to nearest
even leaves one case in which these do not determine the master: at a tie an even param may have been reached from
either side. So `off_the_tie` moves a master at a tie that rounds up by one float32 step: its param stays the same, and
16 bits are enough.

A moment changes by a thousandth of itself per step. Rounding to nearest in a few bits would undo that change every
time, and the moment would never grow nor fall. So moments are rounded stochastically, up or down at random with the
right expectation. In FP8 a moment has one scale for the array, and a second moment is stored as its square root, which
has half the range in exponents. A positive second moment never becomes zero, because Adam divides by its root. Too
large numbers saturate; bfloat16 keeps infinities; a NaN stays NaN.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8.core.formats import E4M3, E5M2, fp8_max
from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.kernels.casting import quantize_reference, with_one_nan

REMAINDER = np.dtype("uint16")
GRID = {np.dtype(E4M3): (3, -6), np.dtype(E5M2): (2, -14)}  # mantissa bits, smallest exponent
LARGEST_BFLOAT16 = 0x7F7F


def off_the_tie(master: jax.Array) -> jax.Array:
    """Float32 masters, moved by one float32 step where they are a tie between two bfloat16 numbers and round up."""
    bits = lax.bitcast_convert_type(master, jnp.uint32)
    return lax.bitcast_convert_type(bits + ((bits & 0x1FFFF) == 0x18000).astype(jnp.uint32), jnp.float32)


def remainder_of(master: jax.Array) -> jax.Array:
    """The 16 bits, uint16, that with `master.astype(bfloat16)` make up a float32 master that is `off_the_tie`."""
    low = lax.bitcast_convert_type(master, jnp.uint32).astype(REMAINDER)
    return jnp.where(jnp.isnan(master), np.uint16(0), low)


def master_of(param: jax.Array, remainder: jax.Array) -> jax.Array:
    """The float32 master of a bfloat16 param and its remainder. A remainder above 0x8000 has rounded the param up by
    one. Where no master has this param and this remainder, it is the param itself.
    """
    param = lax.bitcast_convert_type(param, jnp.uint16).astype(jnp.uint32)
    low = remainder.astype(jnp.uint32)
    bits = (param << 16) + low - jnp.where(low > 0x8000, np.uint32(0x10000), np.uint32(0))
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    belongs = (rounded == param) & ((bits & 0x7FFFFFFF) <= 0x7F800000)
    return lax.bitcast_convert_type(jnp.where(belongs, bits, param << 16), jnp.float32)


def rounds_to(master: jax.Array, param: jax.Array | Fp8Array) -> jax.Array:
    """Where a master, or a remainder, rounds to its param: bool of the param's shape."""
    if isinstance(param, Fp8Array):
        rounded, param = quantize_reference(master, param.dtype, param.scale), param.values
    elif master.dtype == REMAINDER:
        rounded = master_of(param, master).astype(param.dtype)
    else:
        rounded = master.astype(jnp.float32).astype(param.dtype)
    return same_numbers(rounded, param)


def same_numbers(x: jax.Array, y: jax.Array) -> jax.Array:
    """Where two arrays of one dtype are equal, subnormal numbers too, which a comparison of floats may flush to zero.
    One zero is as good as the other, and so is one NaN.
    """
    word = np.dtype(f"uint{8 * x.dtype.itemsize}")
    ours, theirs = (lax.bitcast_convert_type(of, word) for of in (x, y))
    return (ours == theirs) | (((ours | theirs) << 1) == 0) | (jnp.isnan(x) & jnp.isnan(y))


def round_at_random(x: jax.Array, draw: jax.Array, never_zero: bool = False) -> jax.Array:
    """Float32 as bfloat16, rounded up in magnitude with a probability equal to the part that cutting off would lose.

    Args:
      draw: uint32 for every element, of which the upper 16 bits count.
      never_zero: what is positive stays positive, as a divisor must: at least the smallest bfloat16 number.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    stays = (bits & 0x7FFFFFFF) >= LARGEST_BFLOAT16 << 16  # infinite, or cut off to the largest number
    high = (bits + jnp.where(stays, np.uint32(0), draw >> 16)) >> 16
    if never_zero:
        high = jnp.where((high == 0) & (bits > 0), np.uint32(1), high)  # x is not negative
    high = jnp.where(jnp.isnan(x), (high & 0x8000) | 0x7FC0, high)
    return lax.bitcast_convert_type(high.astype(jnp.uint16), jnp.bfloat16)


def quantize_at_random(x: jax.Array, dtype: np.dtype, scale: jax.Array, draw: jax.Array) -> jax.Array:
    """FP8 values of float32 numbers with the given scale, a float32 scalar, rounded up in magnitude with a probability
    equal to the part that rounding down would lose; `draw` is uint32 for every element.
    """
    scaled = x * (np.float32(1) / scale)
    rounded = jnp.copysign(_steps_at_random(jnp.abs(scaled), dtype, draw), scaled)
    return with_one_nan(rounded.astype(dtype), jnp.isnan(scaled))


def quantize_root(v: jax.Array, dtype: np.dtype, scale: jax.Array, draw: jax.Array) -> jax.Array:
    """The same of sqrt(v) for `v` that is not negative, where what is positive stays positive;
    the scale is at least max(sqrt(v)) / fp8_max.
    """
    scaled = jnp.sqrt(v) * (np.float32(1) / scale)
    rounded, smallest = _steps_at_random(scaled, dtype, draw), _smallest(dtype)
    rounded = jnp.where((rounded == 0) & (scaled > 0), smallest, rounded)
    return with_one_nan(rounded.astype(dtype), jnp.isnan(scaled))


def _steps_at_random(x: jax.Array, dtype: jax.typing.DTypeLike, draw: jax.Array) -> jax.Array:
    """Nonnegative numbers rounded at random to values of an FP8 dtype, as float32."""
    mantissa_bits, smallest_exponent = GRID[np.dtype(dtype)]
    x = jnp.minimum(x, fp8_max(dtype))
    biased = (lax.bitcast_convert_type(x, jnp.uint32) >> 23).astype(jnp.int32)
    exponent = jnp.maximum(biased - 127, smallest_exponent)
    step, inverse_step = _power_of_two(exponent - mantissa_bits), _power_of_two(mantissa_bits - exponent)
    fraction = (draw >> 12).astype(jnp.float32) * np.float32(2.0**-20)
    return jnp.minimum(jnp.floor(x * inverse_step + fraction) * step, fp8_max(dtype))


def _smallest(dtype: jax.typing.DTypeLike) -> np.float32:
    mantissa_bits, smallest_exponent = GRID[np.dtype(dtype)]
    return np.float32(2.0 ** (smallest_exponent - mantissa_bits))


def _power_of_two(exponent: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)

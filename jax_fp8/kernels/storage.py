"""How an optimizer keeps numbers in fewer bits than it computes with:
16 bits beside a bfloat16 param, and second moments in 16 or 8.

A float32 master is its param, rounded to bfloat16, and 16 more bits: `remainder`. Rounding to nearest even leaves one
case in which they do not determine the master: halfway between two params, an even param may have been reached from
either side. So a master that would stop halfway and round up stops one float32 step further (`off_the_tie`):
the param is the same, and 16 bits are enough.

A second moment moves by a thousandth of itself per step, which rounding to nearest in a few bits would undo every time.
In FP8 it is therefore rounded up or down at random, with the right expectation, and its square root is what is kept:
that has half the range to cover. A second moment that is not zero never becomes zero, since it is divided by.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8.core.formats import E4M3, fp8_max
from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.kernels.casting import quantize_reference, with_one_nan

REMAINDER = np.dtype("uint16")


def off_the_tie(master: jax.Array) -> jax.Array:
    """Float32 masters, moved by one float32 step where they lie halfway between two bfloat16 numbers
    and would round up.
    """
    bits = lax.bitcast_convert_type(master, jnp.uint32)
    return lax.bitcast_convert_type(bits + ((bits & 0x1FFFF) == 0x18000).astype(jnp.uint32), jnp.float32)


def remainder_of(master: jax.Array) -> jax.Array:
    """The 16 bits, uint16, that with `master.astype(bfloat16)` make up a float32 master that is `off_the_tie`."""
    low = lax.bitcast_convert_type(master, jnp.uint32).astype(REMAINDER)
    return jnp.where(jnp.isnan(master), np.uint16(0), low)


def master_of(param: jax.Array, remainder: jax.Array) -> jax.Array:
    """The float32 master of a bfloat16 param and its remainder:
    a low half beyond the middle has rounded the param up by one.
    """
    high = lax.bitcast_convert_type(param, jnp.uint16) - (remainder > 0x8000).astype(jnp.uint16)
    return lax.bitcast_convert_type((high.astype(jnp.uint32) << 16) | remainder.astype(jnp.uint32), jnp.float32)


def rounds_to(master: jax.Array, param: jax.Array | Fp8Array) -> jax.Array:
    """Where a master, or a remainder, rounds to its param: bool of the param's shape. One zero is as good as the other,
    and so is one NaN.
    """
    if isinstance(param, Fp8Array):
        rounded, param = quantize_reference(master, param.dtype, param.scale), param.values
    elif master.dtype == REMAINDER:
        rounded = master_of(param, master).astype(param.dtype)
    else:
        rounded = master.astype(jnp.float32).astype(param.dtype)
    word = np.dtype(f"uint{8 * param.dtype.itemsize}")
    ours, theirs = (lax.bitcast_convert_type(x, word) for x in (rounded, param))
    both_zero = ((ours | theirs) << 1) == 0
    return (ours == theirs) | both_zero | (jnp.isnan(rounded) & jnp.isnan(param))


def round_second_moment(v: jax.Array, dtype: np.dtype) -> jax.Array:
    """`v` rounded to nearest in float32, bfloat16 or float16, and to the smallest number instead of to zero."""
    rounded = v.astype(dtype)
    if dtype == np.float32:
        return rounded
    smallest = lax.bitcast_convert_type(np.uint16(1), dtype)
    return jnp.where((rounded == 0) & (v > 0), smallest, rounded)


def quantize_root(
    v: jax.Array, dtype: np.dtype, scale: jax.Array, seed: jax.Array, leaf: jax.typing.ArrayLike
) -> jax.Array:
    """FP8 values of sqrt(v) with the given scale, rounded up with a probability equal to the part that rounding down
    would lose.

    Args:
      v: float32, not negative.
      dtype: E4M3 or E5M2.
      scale: float32 scalar, at least max(sqrt(v)) / fp8_max.
      seed: uint32 scalar; with the leaf number and the element's index it decides the rounding,
        the same on every platform.
      leaf: which array of the tree this is.
    """
    mantissa_bits, smallest_exponent = (3, -6) if dtype == E4M3 else (2, -14)
    scaled = jnp.sqrt(v) * (np.float32(1) / scale)
    x = jnp.minimum(scaled, fp8_max(dtype))
    biased = (lax.bitcast_convert_type(x, jnp.uint32) >> 23).astype(jnp.int32)
    exponent = jnp.maximum(biased - 127, smallest_exponent)
    step, inverse_step = _power_of_two(exponent - mantissa_bits), _power_of_two(mantissa_bits - exponent)
    fraction = (_hash(v.shape, seed, leaf) >> 12).astype(jnp.float32) * np.float32(2.0**-20)
    rounded = jnp.floor(x * inverse_step + fraction) * step
    smallest = np.float32(2.0 ** (smallest_exponent - mantissa_bits))
    rounded = jnp.where((rounded == 0) & (x > 0), smallest, jnp.minimum(rounded, fp8_max(dtype)))
    return with_one_nan(rounded.astype(dtype), jnp.isnan(scaled))


def _power_of_two(exponent):
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _hash(shape, seed, leaf):
    """uint32 of `shape`, one per element, from (index, seed, leaf):
    a multiplicative mix and two rounds of xor-shift-multiply.
    """
    index = lax.iota(jnp.uint32, int(np.prod(shape))).reshape(shape)
    leaf_term = jnp.asarray(leaf, jnp.uint32) * np.uint32(0xC2B2AE3D)
    h = index * np.uint32(0x9E3779B1) + seed * np.uint32(0x85EBCA77) + leaf_term
    h = (h ^ (h >> 16)) * np.uint32(0x7FEB352D)
    h = (h ^ (h >> 15)) * np.uint32(0x846CA68B)
    return h ^ (h >> 16)

"""Rotary positions: rotate queries and keys by their position, so that their product depends on the distance.

    pair (i, i + head_dim / 2) of a token at position p   rotated by the angle   p * frequency[i]
    frequency[i] = base^(-2i / head_dim)                                        (https://arxiv.org/abs/2104.09864)

`RotaryScaling` lowers the lowest frequencies, so that a model trained on short sequences can read longer ones.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.checks import check_integer, check_number

ROTARY_BASE = 10_000.0


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """Frequencies of rotary positions for longer sequences, as in Llama 3.1.

    The formula is `apply_scaling` in https://github.com/meta-llama/llama-models, models/llama3/model.py. A pair that
    makes `high_frequency_factor` turns or more within `original_length` tokens keeps its frequency. With
    `low_frequency_factor` turns or fewer the frequency is divided by `factor`. Between these the two are interpolated,
    linearly in the number of turns.

    Args:
      factor: the divisor of low frequencies; at least 1.
      low_frequency_factor, high_frequency_factor: in turns.
      original_length: the sequence length of the first training, in tokens.

    Raises:
      ValueError: if a field is not a number in its range, or `high_frequency_factor` is not above the low one.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> scaling = fp8.RotaryScaling(factor=8.0)
      >>> scaling.slowed(jnp.array([1.0, 1e-4])) / jnp.array([1.0, 1e-4])
      Array([1.   , 0.125], dtype=float32)
    """

    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self):
        check_number("factor of a RotaryScaling", self.factor, "of at least 1", lambda factor: factor >= 1)
        check_integer("original_length of a RotaryScaling", self.original_length)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        check_number("low_frequency_factor", low, "above 0", lambda turns: turns > 0)
        check_number("high_frequency_factor", high, f"above the low one, {low}", lambda turns: turns > low)

    def slowed(self, frequency: jax.Array) -> jax.Array:
        """The frequencies f32[head_dim / 2], in radians a token, of a model with this scaling."""
        turns = self.original_length / (2 * math.pi) * frequency
        low, high = self.low_frequency_factor, self.high_frequency_factor
        kept = jnp.clip((turns - low) / (high - low), 0, 1)
        return frequency * (kept + (1 - kept) / self.factor)


def check_rotary(base: object, scaling: object, of: str = "") -> None:
    """Raise unless `base` and `scaling` are valid; `of` comes before their names in the message."""
    check_number(f"{of}rotary_base", base, "above 1", lambda base: base > 1)
    if scaling is not None and not hasattr(scaling, "slowed"):
        raise ValueError(f"{of}rotary_scaling must be a RotaryScaling or None, got {scaling!r}")


def rotate(
    x: jax.Array,
    positions: jax.Array | None = None,
    base: float = ROTARY_BASE,
    scaling: RotaryScaling | None = None,
) -> jax.Array:
    """Rotate pairs (i, i + head_dim / 2) of `x` (batch, seq, heads, head_dim).

    Args:
      positions: i32[batch, seq]; None: 0, 1, ...
    """
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    frequency = frequency if scaling is None else scaling.slowed(frequency)
    positions = jnp.arange(x.shape[-3]) if positions is None else positions
    angle = positions.astype(jnp.float32)[..., None, None] * lax.broadcast_to_rank(frequency, positions.ndim + 2)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = (lax.broadcast_to_rank(wave(angle), x.ndim) for wave in (jnp.cos, jnp.sin))
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)

"""Rotary positions: rotate queries and keys by their position, so that their product depends on the distance.

    pair (i, i + features / 2) of a token at position p   rotated by the angle   p * frequency[i]
    frequency[i] = base^(-2i / features)                                        (https://arxiv.org/abs/2104.09864)

`features` are the first ones of a head, or all. A scaling (ops/rotary_scaling.py) changes the frequencies, so that a
model trained on short sequences can read longer ones.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.checks import check_number
from jax_fp8.ops.rotary_scaling import Scaling, plain_frequencies

ROTARY_BASE = 10_000.0


def rotated_features(head_dim: int, fraction: float) -> int:
    """How many features of a head rotate."""
    return int(head_dim * fraction)


def check_rotary(base: object, scaling: object, fraction: object = 1.0, of: str = "") -> None:
    """Raise unless these are valid; `of` comes before their names in the message."""
    check_number(f"{of}rotary_base", base, "above 1", lambda base: base > 1)
    check_number(f"{of}rotary_fraction", fraction, "above 0 and at most 1", lambda fraction: 0 < fraction <= 1)
    if scaling is not None and not hasattr(scaling, "frequencies"):
        raise ValueError(f"{of}rotary_scaling must be a RotaryScaling, another scaling or None, got {scaling!r}")


def rotate(
    x: jax.Array,
    positions: jax.Array | None = None,
    base: float = ROTARY_BASE,
    scaling: Scaling | None = None,
    fraction: float = 1.0,
) -> jax.Array:
    """Rotate pairs (i, i + features / 2) of `x` (batch, seq, heads, head_dim).

    Args:
      positions: i32[batch, seq]; None: 0, 1, ...
      fraction: the part of a head's features that rotates, its first ones.
    """
    features = rotated_features(x.shape[-1], fraction)
    length = x.shape[-3] if positions is None else None
    positions = jnp.arange(x.shape[-3]) if positions is None else positions
    waves = rotary_waves(positions, x.shape[-1], base, scaling, fraction, length)
    cos, sin = (lax.broadcast_to_rank(wave[..., None, :], x.ndim) for wave in waves)
    rotated, others = x[..., :features], x[..., features:]
    first, second = jnp.split(rotated.astype(jnp.float32), 2, axis=-1)
    parts = [first * cos - second * sin, second * cos + first * sin]
    rotated = jnp.concatenate(parts, axis=-1).astype(x.dtype)
    return rotated if features == x.shape[-1] else jnp.concatenate([rotated, others], axis=-1)


def rotary_waves(
    positions: jax.Array,
    head_dim: int,
    base: float = ROTARY_BASE,
    scaling: Scaling | None = None,
    fraction: float = 1.0,
    length: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The cosines and sines f32 (..., rotated / 2) by which tokens at `positions` i32 (...) are rotated.

    Args:
      head_dim: of it, `fraction` rotates.
      length: of the sequence, for a scaling that depends on it; None: one more than the largest position.
    """
    features = rotated_features(head_dim, fraction)
    if scaling is None:
        frequency, amplitude = plain_frequencies(base, features), 1.0
    else:
        longest = jnp.max(positions) + 1 if length is None else length
        frequency, amplitude = scaling.frequencies(base, features, longest), scaling.amplitude
    angle = positions.astype(jnp.float32)[..., None] * lax.broadcast_to_rank(frequency, positions.ndim + 1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return (cos, sin) if amplitude == 1 else (cos * amplitude, sin * amplitude)

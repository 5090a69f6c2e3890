"""How a cast to FP8 went: a few numbers of a tensor, found beside the cast and kept with nothing.

Of a tensor x, of what the cast made of it, q, and of its scale:

    amax          the largest |x|; a NaN does not count
    scale         the largest, where there are several
    reach         the largest |x| / (fp8_max * scale): above 1, the tensor is larger than its scale allows
    saturated     share of elements that were cut off: too large to be rounded to fp8_max
    underflowed   share of elements that were not zero and became zero
    nonfinite     share of elements that are infinite or NaN
    error         sqrt(sum (x - q * scale)² / sum x²) over finite elements, relative root mean square

All of them are the worse the larger they are, but for amax and scale, which are what they are. So they leave a step as
amaxes do, by maximum over microbatches, uses and devices: what is reported is the worst of these.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.formats import fp8_max
from jax_fp8.core.fp8_array import Fp8Array, spread

STATISTICS = ("amax", "scale", "reach", "saturated", "underflowed", "nonfinite", "error")


def measure(sources: Sequence[jax.Array], quantized: Fp8Array) -> jax.Array:
    """STATISTICS of a cast, f32[7].

    Args:
      sources: what was cast, matrices (m, n_i) that stand side by side.
      quantized: (m, n), rowwise.
    """
    ends = np.cumsum([source.shape[1] for source in sources])
    whole = spread(quantized.scale, quantized.shape)
    largest, totals = [], []
    for source, end in zip(sources, ends, strict=True):
        columns = slice(end - source.shape[1], end)
        scale = whole if whole.ndim == 0 else whole[:, columns]
        maxima, sums = _measure_part(source, quantized.values[:, columns], scale)
        largest.append(maxima)
        totals.append(sums)
    amax, reach = jnp.max(jnp.stack(largest), axis=0)
    saturated, underflowed, nonfinite, squared_error, squares = jnp.sum(jnp.stack(totals), axis=0)
    count = np.float32(quantized.size)
    error = jnp.sqrt(squared_error / jnp.where(squares > 0, squares, 1))
    shares = saturated / count, underflowed / count, nonfinite / count
    return jnp.stack([amax, jnp.max(quantized.scale), reach, *shares, error])


def _measure_part(source, values, scale) -> tuple[jax.Array, jax.Array]:
    """Maxima f32[2] and sums f32[5], in one pass: squares are those of x / scale, which neither overflow nor vanish."""
    x = source.astype(jnp.float32)
    in_units = x * (np.float32(1) / scale)
    q, bound = values.astype(jnp.float32), fp8_max(values.dtype)
    half_a_step = 0.5 * 2.0 ** (np.floor(np.log2(bound)) - jnp.finfo(values.dtype).nmant)
    is_finite, magnitude = jnp.isfinite(x), jnp.where(jnp.isnan(x), 0, jnp.abs(x))
    reach = jnp.where(jnp.isnan(x), 0, jnp.abs(in_units)) / bound
    counted = jnp.abs(in_units) > bound + np.float32(half_a_step), (x != 0) & (q == 0), ~is_finite
    error, signal = (jnp.where(is_finite, number, 0) for number in (in_units - q, in_units))
    sums = [jnp.sum(number.astype(jnp.float32)) for number in (*counted, error * error, signal * signal)]
    return jnp.stack([jnp.max(magnitude), jnp.max(reach)]), jnp.stack(sums)

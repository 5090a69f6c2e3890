"""How a cast to FP8 went: a few numbers of a tensor, found beside the cast and kept with nothing.

Of a tensor x, of what the cast made of it, q, and of its scale:

    amax          the largest |x|; of all elements, like the next one
    scale         the largest, where there are several: of tiles that hold more than zeros
    reach         the largest |x| / (fp8_max * scale): above 1, the tensor is larger than its scale allows; by tile,
                  each element's own scale counts, and that of zeros does not
    saturated     share of elements that were cut off: too large to be rounded to fp8_max
    underflowed   share of elements that were not zero and became zero
    nonfinite     share of elements that are infinite or NaN; above 0 wherever there is one
    error         sqrt(sum (x - q * scale)² / sum x²) over finite elements, relative root mean square

Shares and error, and by tile scale and reach, are those of at most ROWS rows, evenly spaced: a few million elements say
as much as all of them, and the time this takes does not grow with the batch.

All of these are the worse the larger they are, but for amax and scale, which are what they are. So they leave a step as
amaxes do, by maximum over microbatches, uses and devices: what is reported is the worst of these.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8.core.formats import fp8_max
from jax_fp8.core.fp8_array import Fp8Array, spread

STATISTICS = ("amax", "scale", "reach", "saturated", "underflowed", "nonfinite", "error")
ROWS = 2048  # at least 4 million elements of a layer 2,048 wide


def measure(
    sources_of: Callable[..., Sequence[jax.Array]], tensors: Sequence[jax.Array], quantized: Fp8Array, amax: jax.Array
) -> jax.Array:
    """STATISTICS of a cast, f32[7].

    Args:
      sources_of: of some rows of the `tensors`, those rows of what was cast: matrices (m, n_i) that stand side by side.
      tensors: (m, ...).
      quantized: (m, n), rowwise.
      amax: f32[], of what was cast.
    """
    some = slice(None, None, max(1, quantized.shape[0] // ROWS))
    sources = sources_of(*(tensor[some] for tensor in tensors))
    values = quantized.values[some]
    whole, found = _scales_of_rows(quantized, some), []
    for source, end in zip(sources, np.cumsum([source.shape[1] for source in sources]), strict=True):
        columns = slice(end - source.shape[1], end)
        found.append(_sums(source, values[:, columns], whole if whole.ndim == 0 else whole[:, columns]))
    saturated, underflowed, nonfinite, squared_error, squares = functools.reduce(_added, found)
    one, count = np.float32(1 / quantized.size), np.float32(1 / values.size)
    nonfinite = jnp.where(jnp.isfinite(amax), nonfinite * count, jnp.maximum(nonfinite * count, one))
    error = jnp.sqrt(squared_error / jnp.where(squares > 0, squares, 1))
    if whole.ndim:
        largest, reach = _largest_of_tiles(jnp.concatenate(sources, axis=1), values, whole)
    else:
        largest, reach = whole, amax / (fp8_max(values.dtype) * whole)
    return jnp.stack([amax, largest, reach, saturated * count, underflowed * count, nonfinite, error])


def _scales_of_rows(quantized, some) -> jax.Array:
    """The scale of each element of these rows, or the one of all."""
    scale = quantized.scale
    if scale.ndim == 0:
        return scale
    (rows, columns), (down, across) = quantized.shape, quantized.granularity
    of_rows = spread(scale, (rows, scale.shape[1]), (down, 1))[some]
    return spread(of_rows, (of_rows.shape[0], columns), (1, across))


def _largest_of_tiles(x, values, scale) -> tuple[jax.Array, jax.Array]:
    """Of the scales f32[m, n] of elements that are not zero, and of what these need of them."""
    largest = jnp.max(jnp.where(values.astype(jnp.float32) != 0, scale, 0))
    needed = jnp.abs(x.astype(jnp.float32)) * (np.float32(1 / fp8_max(values.dtype)) / scale)
    return jnp.where(largest > 0, largest, jnp.max(scale)), jnp.max(needed)


def _sums(source, values, scale) -> tuple[jax.Array, ...]:
    """Five sums f32[]; squares are those of x / scale, which neither overflow nor vanish.

    They are one reduction of five arrays: of five reductions, XLA would keep what they share in memory.
    """
    x = source.astype(jnp.float32)
    in_units = x * (np.float32(1) / scale)
    q, bound = values.astype(jnp.float32), fp8_max(values.dtype)
    half_a_step = 0.5 * 2.0 ** (np.floor(np.log2(bound)) - jnp.finfo(values.dtype).nmant)
    is_finite = jnp.isfinite(x)
    counted = jnp.abs(in_units) > bound + np.float32(half_a_step), (x != 0) & (q == 0), ~is_finite
    error, signal = (jnp.where(is_finite, number, 0) for number in (in_units - q, in_units))
    numbers = (*(flag.astype(jnp.float32) for flag in counted), error * error, signal * signal)
    return tuple(lax.reduce(numbers, (np.float32(0),) * len(numbers), _added, range(source.ndim)))


def _added(one, other):
    return tuple(a + b for a, b in zip(one, other, strict=True))

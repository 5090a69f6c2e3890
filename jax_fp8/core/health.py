"""How well a cast to FP8 went: a few statistics of a tensor, computed beside the cast.

The tensor is x, the cast made q of it, with a scale:

    amax          the largest |x|, over all elements
    scale         the scale; by tile, the largest one of tiles that hold more than zeros
    reach         the largest |x| / (fp8_max * scale), over all elements: above 1, the tensor is larger than its scale
                  allows; by tile, each element counts with its own scale, and zeros do not count
    saturated     share of elements that were cut off: too large to be rounded to fp8_max
    underflowed   share of elements that were not zero and became zero
    nonfinite     share of elements that are infinite or NaN; above 0 wherever there is one
    error         sqrt(sum (x - q * scale)² / sum x²) over finite elements, relative root mean square

Shares and error, and by tile also scale and reach, are computed from at most ROWS rows, evenly spaced: a few million
elements say as much as all of them, and the time does not grow with the batch.

For all statistics but amax and scale, larger is worse. So they leave a step as amaxes do, by maximum over microbatches,
uses and devices, and a report shows the worst of them.
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
      sources_of: computes, from some rows of the `tensors`, the same rows of the tensor before its cast: matrices
        (m, n_i) that stand side by side.
      tensors: (m, ...).
      quantized: (m, n), rowwise.
      amax: f32[], of the tensor before its cast.
    """
    some_rows = slice(None, None, max(1, quantized.shape[0] // ROWS))
    sources = sources_of(*(tensor[some_rows] for tensor in tensors))
    values = quantized.values[some_rows]
    scale, sums = _scales_of_rows(quantized, some_rows), []
    for source, end in zip(sources, np.cumsum([source.shape[1] for source in sources]), strict=True):
        columns = slice(end - source.shape[1], end)
        sums.append(_sums(source, values[:, columns], scale if scale.ndim == 0 else scale[:, columns]))
    saturated, underflowed, nonfinite, squared_error, squares = functools.reduce(_added, sums)
    one, per_element = np.float32(1 / quantized.size), np.float32(1 / values.size)
    # The rows that were not sampled may hold the only infinite element: the amax, which saw all of them, tells.
    nonfinite = jnp.where(jnp.isfinite(amax), nonfinite * per_element, jnp.maximum(nonfinite * per_element, one))
    error = jnp.sqrt(squared_error / jnp.where(squares > 0, squares, 1))
    if scale.ndim:
        largest, reach = _largest_of_tiles(jnp.concatenate(sources, axis=1), values, scale)
    else:
        largest, reach = scale, amax / (fp8_max(values.dtype) * scale)
    return jnp.stack([amax, largest, reach, saturated * per_element, underflowed * per_element, nonfinite, error])


def _scales_of_rows(quantized: Fp8Array, rows: slice) -> jax.Array:
    """The scale of each element of these rows, or the one scale of all elements, f32[]."""
    scale = quantized.scale
    if scale.ndim == 0:
        return scale
    (m, n), (down, across) = quantized.shape, quantized.granularity
    of_rows = spread(scale, (m, scale.shape[1]), (down, 1))[rows]
    return spread(of_rows, (of_rows.shape[0], n), (1, across))


def _largest_of_tiles(x: jax.Array, values: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest scale of an element that is not zero, and the largest reach. `scale` f32[m, n] is by element."""
    largest = jnp.max(jnp.where(values.astype(jnp.float32) != 0, scale, 0))
    needed = jnp.abs(x.astype(jnp.float32)) * (np.float32(1 / fp8_max(values.dtype)) / scale)
    return jnp.where(largest > 0, largest, jnp.max(scale)), jnp.max(needed)


def _sums(source: jax.Array, values: jax.Array, scale: jax.Array) -> tuple[jax.Array, ...]:
    """Five sums f32[]: saturated, underflowed and nonfinite elements, squared errors, and squares.

    Squares are of x / scale, so that they neither overflow nor vanish. The five sums are one reduction of five arrays:
    with five reductions, XLA would keep in memory the arrays that they share.
    """
    x = source.astype(jnp.float32)
    in_units = x * (np.float32(1) / scale)
    q, bound = values.astype(jnp.float32), fp8_max(values.dtype)
    # A number up to half a step above the bound is rounded to it, and so not cut off.
    half_a_step = 0.5 * 2.0 ** (np.floor(np.log2(bound)) - jnp.finfo(values.dtype).nmant)
    is_finite = jnp.isfinite(x)
    counted = jnp.abs(in_units) > bound + np.float32(half_a_step), (x != 0) & (q == 0), ~is_finite
    error, signal = (jnp.where(is_finite, number, 0) for number in (in_units - q, in_units))
    numbers = (*(flag.astype(jnp.float32) for flag in counted), error * error, signal * signal)
    return tuple(lax.reduce(numbers, (np.float32(0),) * len(numbers), _added, range(source.ndim)))


def _added(sums: Sequence[jax.Array], others: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    return tuple(a + b for a, b in zip(sums, others, strict=True))

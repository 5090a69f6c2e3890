"""The version of the weights in a cache: a hash of samples of the params that they were cast from.

A reader of a cache compares its version with that of the params, and casts again where they differ. The samples are the
first row and the first column of each kernel, so the hash can miss a change of a few other elements.
"""

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8.core.fp8_array import Fp8Pair
from jax_fp8.core.paths import VERSION, LayerPath
from jax_fp8.kernels.explicit import whole_first
from jax_fp8.ops.weights import kernels_of


def cached_weights(cache: Mapping, path: LayerPath = ()) -> Iterator[tuple[LayerPath, Fp8Pair]]:
    """Every GEMM with a cached weight, and this weight."""
    for name, node in sorted(cache.items()):
        if isinstance(node, Fp8Pair):
            yield path, node
        elif isinstance(node, Mapping):
            yield from cached_weights(node, (*path, name))


def is_stale(cache: Mapping, params: Mapping) -> jax.Array:
    """Whether a cache was made from other params than these, bool[]."""
    return cache[VERSION] != version_of(params, cache)


def version_of(params: Mapping, cache: Mapping) -> jax.Array:
    """A hash, uint32[], of the kernels in a cache: the sum of their samples, each times an odd number that depends on
    its position.
    """
    samples = [_samples(kernel) for path, _ in cached_weights(cache) for kernel in kernels_of(path, params)]
    words = jnp.concatenate(samples)
    position = jnp.arange(words.size, dtype=jnp.uint32)
    return jnp.sum(words * (2 * position * np.uint32(0x9E3779B1) + 1), dtype=jnp.uint32)


def _samples(kernel: jax.Array) -> jax.Array:
    """The bits of the first row and the first column of (..., k, n): one element of every column and of every row."""
    sampled = [whole_first(kernel, dim).reshape(-1) for dim in (-2, -1)]
    bits = [lax.bitcast_convert_type(line, f"uint{8 * kernel.dtype.itemsize}") for line in sampled]
    return jnp.concatenate(bits).astype(jnp.uint32)

"""The largest absolute value of an array, or of several, float32: infinite or NaN where one of its values is,
so that no NaN passes unseen; 0 for an empty array.
"""

from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.kernels.dispatch import Split, dispatch, pmax
from jax_fp8.kernels.explicit import explicit_spec, shards_of


def amax_reference(x: jax.Array) -> jax.Array:
    """max|x| as f32[].

    As integers: what is not negative orders as its bits, NaN above all, which a maximum of floats may lose on a CPU.
    """
    bits = lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.uint32)
    return lax.bitcast_convert_type(jnp.max(bits, initial=0), jnp.float32)


def amax(*arrays: jax.Array) -> jax.Array:
    """max|x| as f32[], for floating point `x` of any shape; of several arrays, over all."""
    dims = ", ".join(f"m{number} n{number}" for number in range(len(arrays)))
    (result,) = dispatch(f"{dims} -> ", _kernel, _reference, *map(as_matrix, arrays))
    return result


def as_matrix(x: jax.Array) -> jax.Array:
    """Leading dims flattened: (..., n) as (m, n), a scalar as (1, 1)."""
    if x.ndim == 2:
        return x
    if any(shards_of(x, dim) > 1 for dim in range(1, x.ndim - 1)):
        raise ValueError(
            f"leading dims are flattened, so only the first may be split on an Explicit mesh, got {explicit_spec(x)} "
            f"for shape {x.shape}; split the batch and not the sequence, or use Auto axes"
        )
    return x.reshape(-1, x.shape[-1]) if x.ndim and x.size else x.reshape(1, x.size)


def _kernel(*arrays: jax.Array, split: Split):
    result = jax.ffi.ffi_call("jax_fp8_amax", jax.ShapeDtypeStruct((), jnp.float32))(*arrays)
    return (pmax(result, split, *split),)


def _reference(*arrays: jax.Array, split: Split):
    return (pmax(reduce(jnp.maximum, map(amax_reference, arrays)), split, *split),)

"""The largest absolute value of an array, float32: over everything that is not NaN, infinities included; 0 for an empty array."""

import jax
import jax.numpy as jnp

from jax_fp8.ops.dispatch import Split, dispatch, pmax


def amax_reference(x: jax.Array) -> jax.Array:
    """max|x| as f32[]."""
    magnitude = jnp.abs(x.astype(jnp.float32))
    return jnp.max(jnp.where(jnp.isnan(magnitude), 0, magnitude), initial=0)


def amax(x: jax.Array) -> jax.Array:
    """max|x| as f32[], for floating point `x` of any shape."""
    (result,) = dispatch("m n -> ", _kernel, _reference, as_matrix(x))
    return result


def as_matrix(x: jax.Array) -> jax.Array:
    """Leading dims flattened: (..., n) as (m, n), a scalar as (1, 1)."""
    if x.ndim == 2:
        return x
    return x.reshape(-1, x.shape[-1]) if x.ndim and x.size else x.reshape(1, x.size)


def _kernel(x, split: Split):
    result = jax.ffi.ffi_call("jax_fp8_amax", jax.ShapeDtypeStruct((), jnp.float32))(x)
    return (pmax(result, split, "m", "n"),)


def _reference(x, split: Split):
    return (pmax(amax_reference(x), split, "m", "n"),)

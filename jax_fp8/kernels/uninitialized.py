"""Arrays that nobody has written yet: room for what a loop keeps from turn to turn.

On a GPU what stands there is what stood there before. The reference fills it with NaN, or zeros where there is none: a
program that reads what it has not written cannot fail to notice.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.kernels import dispatch

TARGET = "jax_fp8_uninitialized"


def uninitialized(shapes: Any) -> Any:
    """A tree of arrays of these shapes and dtypes (`jax.ShapeDtypeStruct`), to be written before they are read.

    In one call, so that no two of them are taken to be the same array.
    """
    leaves, structure = jax.tree.flatten(shapes)
    if not leaves:
        return shapes
    results = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    reference = partial(uninitialized_reference, results)
    call = jax.ffi.ffi_call(TARGET, results) if dispatch.kernels_run() else reference
    return structure.unflatten(lax.platform_dependent(cuda=call, default=reference))


def uninitialized_reference(shapes: list[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Full of NaN; of zeros where the dtype has none. Results of one shape and dtype are one array."""
    full = {
        (of.shape, of.dtype): jnp.full(of.shape, jnp.nan if jnp.issubdtype(of.dtype, jnp.floating) else 0, of.dtype)
        for of in {(of.shape, of.dtype): of for of in shapes}.values()
    }
    return [full[of.shape, of.dtype] for of in shapes]

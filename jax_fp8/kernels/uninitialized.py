"""Arrays without contents: memory that a loop fills as it runs.

On a GPU they hold whatever the memory held before. The reference fills them with NaN, or with zeros where a dtype has
no NaN, so that a program that reads before it writes gives a visible error.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.types import PyTree
from jax_fp8.kernels import dispatch

TARGET = "jax_fp8_uninitialized"


def uninitialized(shapes: PyTree) -> PyTree:
    """A tree of arrays of these shapes and dtypes (`jax.ShapeDtypeStruct`), to be written before they are read.

    One call makes all of them, so that XLA does not merge two calls with equal shapes into one array.
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

"""Rows of an FP8 matrix in another order, as they are and transposed: bytes are moved, and none is changed.

The tokens of a mixture of experts are cast once, and each is copied to the group of each of its experts. The copies are
a byte an element, where a cast of copied rows would read and write bfloat16 first.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.kernels.casting import NOTHING
from jax_fp8.kernels.dispatch import Split, dispatch, gathered

TARGET = "jax_fp8_take_rows"
MULTIPLE = 16  # of the features, and for a transpose of the rows


def take_rows_of_fp8(x: jax.Array, sources: jax.Array, transposes: bool) -> tuple[jax.Array, ...]:
    """Row `sources[i]` of FP8 values `x` (of_x, features) for each row i; zeros where `x` has no such row.

    Args:
      sources: i32[rows].
      transposes: return the transpose (features, rows), too.

    Returns:
      (rows, features), and perhaps its transpose.
    """
    rule = "t k, r -> r k, k r" if transposes else "t k, r -> r k"
    kernel, reference = (partial(form, transposes) for form in (_kernel, _reference))
    return dispatch(rule, kernel, reference, x, sources)


def _kernel(transposes: bool, x: jax.Array, sources: jax.Array, split: Split):
    rows, features = sources.size, x.shape[1]
    if features % MULTIPLE or (transposes and rows % MULTIPLE):  # which no FP8 GEMM multiplies
        return _reference(transposes, x, sources, split)
    shapes = (rows, features), (features, rows) if transposes else NOTHING
    call = jax.ffi.ffi_call(TARGET, tuple(jax.ShapeDtypeStruct(shape, x.dtype) for shape in shapes))
    taken, transpose = call(gathered(x, split, "t"), sources)
    return (taken, transpose) if transposes else (taken,)


def _reference(transposes: bool, x: jax.Array, sources: jax.Array, split: Split):
    whole = lax.bitcast_convert_type(gathered(x, split, "t"), jnp.uint8)
    place = jnp.where(sources < 0, whole.shape[0], sources)  # a negative index counts from the end
    bits = whole.at[place].get(mode="fill", fill_value=0)
    forms = (bits, jnp.transpose(bits)) if transposes else (bits,)
    return tuple(lax.bitcast_convert_type(form, x.dtype) for form in forms)

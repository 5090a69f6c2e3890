"""A dtype whose sums are maxima: what jax adds up by itself, over several uses of a value, becomes the largest."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import fp32_max_grad
from jax import lax

from jax_fp8.core.types import PyTree

Tree = TypeVar("Tree", bound=PyTree)


def by_maximum(state: Tree) -> Tree:
    """The state of FP8 products in a dtype in which their new states add up by maximum.

    The new state of a product is the cotangent of its state (see `dot_general`). Where one state serves several
    products, or microbatches inside of one loss, jax adds up these cotangents. Of this dtype the "sum" is the larger
    one, entry by entry, and that is right. Convert inside of the loss, before the state is used: gradients are float32.
    Outside of `jax.jit` jax cannot add up arrays of this dtype.

    Args:
      state: a tree of float32 arrays that are not negative.

    Returns:
      The same tree in Flax's dtype `fp32_max_grad`. `dot_general`, `einsum` and Flax's own FP8 layers take it.

    Raises:
      ValueError: if a leaf is not float32.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> recipe = fp8.DelayedScaling(amax_history_len=4)
      >>> x, state = jnp.full((16, 16), 448.0), fp8.init_state(recipe)
      >>> def loss_fn(state):
      ...     state = fp8.by_maximum(state)
      ...     y = fp8.einsum("md,dh->mh", x, x, recipe=recipe, state=state)
      ...     return jnp.mean(fp8.einsum("md,dh->mh", y / 1024, x, recipe=recipe, state=state))
      >>> new_state = jax.jit(jax.grad(loss_fn))(state)
      >>> new_state["scale"][:2]
      Array([7., 1.], dtype=float32)
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if getattr(leaf, "dtype", None) != jnp.float32:
            raise ValueError(
                f"the FP8 state must be float32, got {getattr(leaf, 'dtype', type(leaf).__name__)} at "
                f"{jax.tree_util.keystr(path) or 'its root'}; pass it as the last step has returned it"
            )
    return jax.tree.map(sums_are_maxima, state)


@jax.custom_vjp
def sums_are_maxima(rows: jax.Array) -> jax.Array:
    """float32 in a dtype whose cotangents jax "adds" by taking the larger one."""
    with jax.debug_nans(False):  # debug_nans cannot check an array of such a dtype outside of jit
        return lax.convert_element_type(rows, fp32_max_grad)


sums_are_maxima.defvjp(
    lambda rows: (sums_are_maxima(rows), None),
    lambda _, maxima: (jnp.maximum(lax.convert_element_type(maxima, jnp.float32), 0),),
)


def is_by_maximum(array: jax.Array) -> bool:
    """Whether an array has this dtype."""
    return array.dtype == fp32_max_grad


def as_float32(array: jax.Array) -> jax.Array:
    """Its values, without a gradient."""
    return lax.convert_element_type(array, jnp.float32) if is_by_maximum(array) else array


def like(array: jax.Array, values: jax.Array) -> jax.Array:
    """Values f32[...] in the dtype of an array."""
    with jax.debug_nans(False):
        return lax.convert_element_type(values, array.dtype)

"""Haliax: the `dot_general` of its linear layers in FP8, also inside of `hnn.Stacked` and under `hax.vmap`.

    model, listing = in_fp8(model, recipe)
    overwrites, grads = hax.quantization.partition_for_grad_overwrite(grads)
    model = hax.quantization.apply_updates(model, updates, overwrites)

The new state of a product is the gradient by its state (ops/carried_state.py). Haliax knows this convention: it puts
the gradient of an `OverwriteWithGradient` module in the place of the module.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import KeyPath, tree_map_with_path

from jax_fp8.core.recipe import Recipe
from jax_fp8.core.types import PyTree
from jax_fp8.integrations.listing import Listing, why_not_sizes
from jax_fp8.integrations.modules import Where, check_asked, imported, is_asked, others, path_name
from jax_fp8.integrations.vmapped import CarriedState, product
from jax_fp8.ops.dot_general import DimensionNumbers

Tree = TypeVar("Tree", bound=PyTree)


def dot_general_op(
    recipe: Recipe, kernel: jax.Array | None = None, compute_dtype: jax.typing.DTypeLike | None = None
) -> Callable[..., jax.Array]:
    """The `dot_general` of one `hnn.Linear`, in FP8.

    Args:
      recipe: how tensors are quantized.
      kernel: the array of the layer's weight. Its scale is then right from the start, and by its shape the product
        knows it where jax's einsum swaps the operands. None: it is the second operand.
      compute_dtype: of the operands before they are quantized, and of the result; None is the dtype of the kernel.

    Returns:
      An `OverwriteWithGradient` module with the state; for a recipe without state, a module without arrays.

    Raises:
      ValueError: if `recipe` is not a recipe.
      ImportError: if Haliax is not installed.

    Example:
      >>> import jax_fp8 as fp8
      >>> from jax_fp8.integrations.haliax import dot_general_op
      >>> def make(In, Out, key):
      ...     import haliax.nn as hnn
      ...     return hnn.Linear.init(In, Out, key=key, dot_general=dot_general_op(fp8.DelayedScaling()))
      >>> make.__name__
      'make'
    """
    check_asked("dot_general_op", recipe, None)
    shape = None if kernel is None else tuple(kernel.shape)
    return _op(CarriedState.first(recipe, kernel), recipe, compute_dtype, shape, "Linear")


def in_fp8(
    model: Tree, recipe: Recipe, where: Where = None, compute_dtype: jax.typing.DTypeLike | None = None
) -> tuple[Tree, Listing]:
    """Give the `hnn.Linear` layers of a model a `dot_general` in FP8.

    Args:
      model: a tree with Haliax modules. Layers inside of `hnn.Stacked` get a state for each block.
      recipe: how tensors are quantized.
      where: which layers, by paths such as "transformer.layers.stacked.mlp.up_proj": a regular expression that is
        searched in the path, a collection of last names, or a function of the path. None takes all.
      compute_dtype: as of `dot_general_op`.

    Returns:
      The new model, and the listing of what is in FP8 and what is left, and why.

    Raises:
      ValueError: if `recipe` or `where` is something else.
      ImportError: if Haliax is not installed.

    Example:
      >>> import jax_fp8 as fp8
      >>> from jax_fp8.integrations import haliax as fp8_haliax
      >>> def convert(model):
      ...     model, listing = fp8_haliax.in_fp8(model, fp8.DelayedScaling(), ["up_proj", "down_proj"])
      ...     print(listing)
      ...     return model
      >>> convert.__name__
      'convert'
    """
    check_asked("in_fp8", recipe, where)
    hnn, vmap = imported("haliax.nn", "haliax"), imported("haliax", "haliax").vmap
    taken, left = [], {}

    def swap(blocks: tuple[Any, ...], prefix: KeyPath, path: KeyPath, node: Any) -> PyTree:
        path = (*prefix, *path)
        if isinstance(node, hnn.Stacked):
            inner = functools.partial(swap, (*blocks, node.Block), (*path, jax.tree_util.GetAttrKey("stacked")))
            return replace(node, stacked=tree_map_with_path(inner, node.stacked, is_leaf=is_special))
        if not isinstance(node, hnn.Linear):
            return node
        name, names = path_name(path), {block.name for block in blocks}
        reason = why_not_sizes(*map(_size, (node.In, node.Out))) if is_asked(where, name) else "not asked for"
        if reason is not None:
            left[name] = reason
            return node
        taken.append(name)
        weight = node.weight * node.reparam.active_scale if hasattr(node, "reparam") else node.weight  # as it is called
        make = functools.reduce(vmap, reversed(blocks), lambda weight: CarriedState.first(recipe, weight.array))
        shape = tuple(axis.size for axis in node.weight.axes if axis.name not in names)
        return replace(node, dot_general=_op(make(weight), recipe, compute_dtype, shape, name))

    is_special = lambda node: isinstance(node, hnn.Linear | hnn.Stacked)  # noqa: E731
    new = tree_map_with_path(functools.partial(swap, (), ()), model, is_leaf=is_special)
    left |= others(model, imported("equinox", "haliax").Module, hnn.Linear, hnn.Stacked)
    return new, Listing(tuple(taken), left)


def _size(axes: Any) -> int:
    return math.prod(axis.size for axis in (axes if isinstance(axes, tuple) else (axes,)))


def _op(state: CarriedState | None, *static: Any) -> Callable[..., jax.Array]:
    with_state, without = _op_types()
    return without(*static) if state is None else with_state(*static, state)


@functools.cache
def _op_types() -> tuple[Any, Any]:
    """The `dot_general` with state, and the one without."""
    eqx, quantization = imported("equinox", "haliax"), imported("haliax.quantization", "haliax")

    class Fp8Product(eqx.Module):
        recipe: Recipe = eqx.field(static=True)
        compute_dtype: Any = eqx.field(static=True)
        kernel_shape: tuple[int, ...] | None = eqx.field(static=True)
        layer: str = eqx.field(static=True)

        def __call__(
            self,
            lhs: jax.Array,
            rhs: jax.Array,
            dimension_numbers: DimensionNumbers,
            precision: lax.PrecisionLike = None,
            preferred_element_type: Any = None,
        ) -> jax.Array:
            del preferred_element_type  # the compute dtype, as in Haliax's own FP8
            is_swapped = rhs.shape != self.kernel_shape == lhs.shape
            x, kernel = (rhs, lhs) if is_swapped else (lhs, rhs)
            if is_swapped:
                (of_kernel, of_x), (kernel_batch, x_batch) = dimension_numbers
                dimension_numbers = (of_x, of_kernel), (x_batch, kernel_batch)
            dtype = kernel.dtype if self.compute_dtype is None else self.compute_dtype
            x, kernel, state = x.astype(dtype), kernel.astype(dtype), getattr(self, "state", None)
            y = product(self.layer, self.recipe, x, kernel, dimension_numbers, state, precision, dtype)
            contracted, batch = (len(of[0]) for of in dimension_numbers)
            rows = range(batch, x.ndim - contracted)
            return jnp.moveaxis(y, rows, range(y.ndim - len(rows), y.ndim)) if is_swapped else y

    class Fp8ProductWithState(Fp8Product, quantization.OverwriteWithGradient):
        state: CarriedState

    return Fp8ProductWithState, Fp8Product

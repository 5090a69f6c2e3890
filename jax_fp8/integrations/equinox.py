"""Equinox: its linear layers in FP8, called under `jax.vmap` as always, with their state as a field of each layer.

    model, listing = in_fp8(model, recipe)
    grads = eqx.filter_grad(loss_fn)(model, batch)    new_states, grads = split(grads)
    updates, opt_state = optimizer.update(grads, opt_state)    model = apply_updates(model, updates, new_states)

The new state of a layer is the gradient by its state (ops/carried_state.py). Equinox takes gradients by every array of
floating point numbers, so by states too. `Linear` derives from `eqx.nn.Linear`, and is made when it is first asked for:
this module imports Equinox only then.
"""

import functools
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath, tree_map_with_path

from jax_fp8.core.maxima import is_by_maximum, sums_are_maxima
from jax_fp8.core.recipe import DelayedScaling, Recipe
from jax_fp8.core.types import PyTree
from jax_fp8.integrations.listing import Listing, why_not_sizes
from jax_fp8.integrations.modules import Where, check_asked, imported, is_asked, others, path_name
from jax_fp8.integrations.vmapped import CarriedState, product

if TYPE_CHECKING:
    Linear: Any

Tree = TypeVar("Tree", bound=PyTree)


def in_fp8(model: Tree, recipe: Recipe, where: Where = None) -> tuple[Tree, Listing]:
    """Swap the `eqx.nn.Linear` layers of a model for FP8 layers with the same weights.

    Args:
      model: a tree with Equinox modules. Layers that `eqx.filter_vmap` has stacked get a state each.
      recipe: how tensors are quantized.
      where: which layers, by paths such as "layers.0.attention.query_proj": a regular expression that is searched in
        the path, a collection of last names, or a function of the path. None takes all.

    Returns:
      The new model, and the listing of what is in FP8 and what is left, and why.

    Raises:
      ValueError: if `recipe` or `where` is something else.
      ImportError: if Equinox is not installed.

    Example:
      >>> import jax_fp8 as fp8
      >>> from jax_fp8.integrations import equinox as fp8_equinox
      >>> def make(key):
      ...     import equinox as eqx
      ...     mlp = eqx.nn.MLP(16, 10, width_size=64, depth=2, key=key)
      ...     model, listing = fp8_equinox.in_fp8(mlp, fp8.DelayedScaling(), lambda path: path != "layers.2")
      ...     print(listing)
      ...     return model
      >>> make.__name__
      'make'
    """
    check_asked("in_fp8", recipe, where)
    eqx, layer_type = imported("equinox", "equinox"), _linear_type()
    taken, left = [], {}

    def swap(path: KeyPath, node: PyTree) -> PyTree:
        if not isinstance(node, eqx.nn.Linear):
            return node
        name = path_name(path)
        reason = _why_not(node, eqx.nn.Linear) if is_asked(where, name) else "not asked for"
        if reason is not None:
            left[name] = reason
            return node
        taken.append(name)
        return _swapped(layer_type, node, recipe)

    new = tree_map_with_path(swap, model, is_leaf=lambda node: isinstance(node, eqx.nn.Linear))
    return new, Listing(tuple(taken), left | others(model, eqx.Module, eqx.nn.Linear))


def split(tree: Tree) -> tuple[Tree, Tree]:
    """The FP8 states of a tree, and all else: of gradients, the new states and the gradients of params.

    Args:
      tree: gradients; or a model, whose optimizer then keeps nothing for FP8 states.

    Returns:
      The tree with None in the place of all else, and the tree with None in the place of each state.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> from jax_fp8.integrations.equinox import CarriedState, split
      >>> kernel = jnp.ones((16, 32))
      >>> states, params = split({"weight": kernel, "fp8": CarriedState.first(fp8.DelayedScaling(), kernel)})
      >>> states["weight"], params["fp8"]
      (None, None)
    """
    states = jax.tree.map(lambda node: node if _is_state(node) else None, tree, is_leaf=_is_state)
    return states, jax.tree.map(lambda node: None if _is_state(node) else node, tree, is_leaf=_is_state)


def apply_updates(model: Tree, updates: PyTree, new_states: PyTree) -> Tree:
    """Add updates to the params of a model, and put new states in the place of the old ones.

    A layer that the step did not run keeps its state.

    Args:
      model: whose gradients were taken.
      updates: of an optimizer, from the second result of `split`. None changes no params.
      new_states: the first result of `split`. None changes no states.

    Returns:
      The new model.

    Raises:
      ValueError: if the updates hold states, because the gradients were not split.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> from jax_fp8.integrations.equinox import CarriedState, apply_updates, product, split
      >>> recipe, x = fp8.DelayedScaling(amax_history_len=4), jnp.full((32, 16), 896.0)
      >>> model = {"weight": jnp.ones((16, 48)), "fp8": CarriedState.first(recipe, jnp.ones((16, 48)))}
      >>> numbers = (((0,), (0,)), ((), ()))  # of one example
      >>> def loss_fn(model):
      ...     multiply = lambda x: product("up", recipe, x, model["weight"], numbers, model["fp8"])
      ...     return jnp.mean(jax.vmap(multiply)(x))
      >>> new_states, grads = split(jax.grad(loss_fn)(model))
      >>> model = apply_updates(model, jax.tree.map(lambda gradient: -0.1 * gradient, grads), new_states)
      >>> model["fp8"].scale[0].item()
      2.0
    """

    def updated(old: PyTree, update: PyTree) -> PyTree:
        if _is_state(old):
            if jax.tree.leaves(update):
                raise ValueError("updates must hold no FP8 states, got some; split gradients before the optimizer")
            return old
        return old if update is None else jnp.asarray(old + update).astype(old.dtype)

    def carried_on(old: PyTree, new: PyTree) -> PyTree:
        if not _is_state(old) or not _is_state(new):
            return old
        was_run = new.passes > 0
        return jax.tree.map(
            lambda new, old: jnp.where(was_run.reshape(*was_run.shape, *(1,) * (old.ndim - was_run.ndim)), new, old),
            new,
            old,
        )

    model = model if updates is None else jax.tree.map(updated, model, updates, is_leaf=_is_none_or_state)
    return model if new_states is None else jax.tree.map(carried_on, model, new_states, is_leaf=_is_none_or_state)


def by_maximum(model: Tree) -> Tree:
    """The model for a loss that uses a layer several times: amaxes of all uses then add up by maximum.

    Without it, the new state is the mean over the uses. Call it inside of the loss, before the model is used. It needs
    `jax.jit`.

    Args:
      model: with FP8 states, of Equinox or of Haliax.

    Returns:
      The same model, with states in the dtype of `jax_fp8.by_maximum`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> from jax_fp8.integrations.equinox import CarriedState, by_maximum, product
      >>> recipe, x, kernel = fp8.DelayedScaling(amax_history_len=4), jnp.ones((16, 16)), jnp.ones((16, 16))
      >>> def loss_fn(state):
      ...     state, numbers = by_maximum(state), (((1,), (0,)), ((), ()))
      ...     y = product("tied", recipe, x, kernel, numbers, state)
      ...     return jnp.mean(product("tied", recipe, y, kernel, numbers, state))
      >>> new_state = jax.jit(jax.grad(loss_fn))(CarriedState.first(recipe, kernel))
      >>> new_state.amax_history[0, -1].item()
      16.0
    """

    def convert(node: PyTree) -> PyTree:
        if not _is_state(node) or is_by_maximum(node.scale):
            return node
        return replace(node, **jax.tree.map(sums_are_maxima, node.of_one_pass()))

    return jax.tree.map(convert, model, is_leaf=_is_state)


def _is_state(node: PyTree) -> bool:
    return isinstance(node, CarriedState)


def _is_none_or_state(node: PyTree) -> bool:
    return node is None or _is_state(node)


# ---- the layer -------------------------------------------------------------------------------------------------------


def __getattr__(name: str) -> Any:
    if name != "Linear":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _linear_type()


@functools.cache
def _linear_type() -> Any:
    eqx = imported("equinox", "equinox")

    class Linear(eqx.nn.Linear):
        """`eqx.nn.Linear` in FP8. It takes one example, for `jax.vmap`, or a batch of them.

        Args:
          in_features, out_features: multiples of 16.
          use_bias, dtype, key: as of `eqx.nn.Linear`.
          recipe: how tensors are quantized.
        """

        fp8: CarriedState | None
        recipe: Recipe = eqx.field(static=True)

        def __init__(
            self,
            in_features: int,
            out_features: int,
            use_bias: bool = True,
            dtype: Any = None,
            *,
            key: jax.Array,
            recipe: Recipe = DelayedScaling(),  # noqa: B008 - a frozen value
        ):
            check_asked("Linear", recipe, None)
            reason = _why_not_features(in_features, out_features)
            if reason is not None:
                raise ValueError(f"Linear in FP8: {reason}; pad them, or use eqx.nn.Linear")
            super().__init__(in_features, out_features, use_bias, dtype, key=key)
            self.fp8 = CarriedState.first(recipe, self.weight)
            self.recipe = recipe

        def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
            """Multiply x (..., in_features) by the weight, and add the bias."""
            del key
            if jnp.ndim(x) < 1 or x.shape[-1] != self.in_features:
                raise ValueError(f"Linear takes (..., {self.in_features}), got {jnp.shape(x)}; transpose or reshape x")
            numbers = ((x.ndim - 1,), (1,)), ((), ())
            name = f"Linear({self.in_features}, {self.out_features})"
            y = product(name, self.recipe, x, self.weight, numbers, self.fp8)
            return y if self.bias is None else y + self.bias

    Linear.__qualname__ = "Linear"  # by which it is pickled
    return Linear


def _swapped(layer_type: Any, layer: Any, recipe: Recipe) -> Any:
    """An FP8 layer with the weights of a layer, or of stacked ones, without drawing new ones."""
    first = functools.partial(CarriedState.first, recipe)
    for _ in range(layer.weight.ndim - 2):
        first = jax.vmap(first)
    new = object.__new__(layer_type)
    values = {field.name: getattr(layer, field.name) for field in fields(layer)}
    for name, value in (values | {"fp8": first(layer.weight), "recipe": recipe}).items():
        object.__setattr__(new, name, value)
    return new


def _why_not(layer: Any, plain: type) -> str | None:
    if type(layer) is not plain:
        return "in FP8 already" if isinstance(layer, _linear_type()) else f"{type(layer).__name__}, a class of its own"
    return _why_not_features(layer.in_features, layer.out_features)


def _why_not_features(in_features: int | str, out_features: int | str) -> str | None:
    if isinstance(in_features, str) or isinstance(out_features, str):
        return "scalar features"
    return why_not_sizes(in_features, out_features)

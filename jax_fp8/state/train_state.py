"""`TrainState`: all that a training step reads and writes, as one pytree.

model.init → variables ─TrainState.create→ state ─step(state, batch)→ the next state
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.extend.core import Literal
from jax.sharding import NamedSharding, PartitionSpec

from jax_fp8.core.frozen import FROZEN
from jax_fp8.core.ids import check_integers_are_kept
from jax_fp8.core.types import Batch, PyTree, Variables
from jax_fp8.grads.loss_aux import OWN_COLLECTIONS, others_of
from jax_fp8.kernels.explicit import inside_mesh_of
from jax_fp8.parallel.names import without_names
from jax_fp8.parallel.placement import Placement
from jax_fp8.state.checks import (
    check_holds_arrays,
    check_is,
    check_optimizer,
    check_variables,
)
from jax_fp8.state.serialization import register_serialization
from jax_fp8.state.weight_cache import refresh

GRADIENTS = "_overwrite_with_gradient"  # the collection of Flax's own FP8 layers: a step replaces it by its gradient
STATE_REMEDY = "call step(state, batch) with TrainState.create(variables=..., tx=tx)"


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class TrainState:
    """All that a training step reads and writes, as one pytree.

    Args:
      step: int32[], the number of steps so far.
      params: nested dicts of arrays, the collection "params".
      fp8: the scales and amax histories of delayed scaling, the collection "fp8"; {} for recipes without state.
      opt_state: of the optimizer.
      cache: the weights in FP8, from `cast_weights`; or {}.
      collections: other variables of the model by collection, such as "batch_stats".

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> variables = fp8.Dense(32).init(jax.random.key(0), jnp.ones((2, 16)))
      >>> state = fp8.TrainState.create(variables=variables, tx=fp8.fused_adamw(1e-3))
      >>> int(state.step), sorted(state.variables)
      (0, ['fp8', 'params'])
    """

    step: jax.Array
    params: PyTree
    fp8: PyTree
    opt_state: PyTree
    cache: PyTree = field(default_factory=dict)
    collections: PyTree = field(default_factory=dict)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, PyTree]], tuple[str, ...]]:
        """The fields; without `collections` if empty, as in states that were saved before the field existed."""
        has_none = isinstance(self.collections, Mapping) and not self.collections
        names = FIELDS[:-1] if has_none else FIELDS
        return [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names], names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], children: Iterable[PyTree]) -> "TrainState":
        return cls(**dict(zip(names, children, strict=True)))

    @classmethod
    def create(cls, *, variables: Variables, tx: optax.GradientTransformation) -> "TrainState":
        """Make the state before the first step.

        A step may donate its state, so all arrays are copies: `variables` stay valid, and so do arrays inside of `tx`,
        such as a random key.

        Args:
          variables: the result of `model.init`: "params", and "fp8" where the recipe has state. With "fp8_cache" from
            `cast_weights`, steps read the weights from this cache and the optimizer writes new ones to it. All other
            collections become `collections`, which a loss with `has_aux` may change. The state has arrays alone: names
            of dims that params carry (`nn.LogicallyPartitioned`) are removed.
          tx: the optimizer.

        Returns:
          The state, with step 0.

        Raises:
          ValueError: if `variables` are not what `model.init` returns, or `tx` is not an Optax transform.
        """
        check_variables(variables)
        check_optimizer(tx)
        if "params" not in variables:
            raise ValueError(f'variables must hold "params", got {sorted(variables)}; pass what model.init returned')
        variables = without_names(variables)
        check_holds_arrays("variables", variables)
        variables = jax.tree.map(jnp.copy, variables)
        params, fp8, cache = (variables.get(name, {}) for name in OWN_COLLECTIONS)
        others = others_of(variables)
        if GRADIENTS in others:
            raise ValueError(
                f'variables must not hold "{GRADIENTS}", which a step would have to replace by its gradients, got '
                f"{sorted(variables)}; use layers of jax_fp8, or write your own loop"
            )
        with inside_mesh_of(params):
            opt_state = _init_copied(tx.init, params)
            return cls(jnp.zeros((), jnp.int32), params, dict(fp8), opt_state, dict(cache), others)

    @property
    def variables(self) -> dict[str, PyTree]:
        """The variables for `model.apply`."""
        own = dict(zip(OWN_COLLECTIONS, (self.params, self.fp8, self.cache), strict=True))
        return {name: tree for name, tree in own.items() if tree or name == "params"} | self.collections

    def replace(self, **changes: Any) -> "TrainState":
        """Copy the state with other values of some fields.

        If it has a weight cache, new params or scales are cast to FP8 again.

        Args:
          **changes: the new values, by field.

        Returns:
          The new state.

        Raises:
          TypeError: if there is no such field.
          ValueError: if there is a weight cache, and its kernels or scales are not in the new params or FP8 state.
        """
        new = dataclasses.replace(self, **changes)
        if not new.cache or "cache" in changes or not {"params", "fp8"} & set(changes):
            return new
        return dataclasses.replace(new, cache=refresh(new.cache, new.params, new.fp8))


def _init_copied(init: Callable[[PyTree], PyTree], params: PyTree) -> PyTree:
    """`init(params)` without shared arrays, so that a step may donate it. Arrays of `params`, arrays inside of `init`,
    such as a random key, and second uses of an array are copied. Arrays that `init` computes, such as large moments,
    are not.
    """
    opt_state = init(params)
    leaves, tree = jax.tree.flatten(opt_state)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((params, leaves))):
        return opt_state
    traced = jax.make_jaxpr(init)(params).jaxpr
    unused = {var for equation in traced.eqns for var in equation.outvars}
    owned = []
    for leaf, var in zip(leaves, traced.outvars, strict=True):
        is_own = not isinstance(var, Literal) and var in unused
        owned.append(leaf if is_own or not isinstance(leaf, jax.Array) else jnp.copy(leaf))
        unused -= {var} if is_own else set()
    return tree.unflatten(owned)


def check_given(state: object, batch: Batch) -> None:
    """Raise unless these can be the arguments of a step."""
    check_is("state", state, TrainState, STATE_REMEDY)
    check_holds_arrays("batch", batch)
    check_integers_are_kept(batch)


def placed_state(placement: Placement, state: TrainState) -> TrainState:
    """The shardings of a state on a mesh. `collections` are replicated on all devices, whatever names are in them,
    except for frozen kernels.
    """
    replicated = NamedSharding(placement.parallel.mesh, PartitionSpec())
    shardings = placement.shardings(dataclasses.replace(state, collections={}))
    collections = jax.tree.map(lambda _: replicated, state.collections)
    if FROZEN in collections:
        collections[FROZEN] = placement.shardings_of_frozen(state.collections[FROZEN])
    return dataclasses.replace(shardings, collections=collections)


FIELDS = tuple(field.name for field in dataclasses.fields(TrainState))
register_serialization(TrainState, FIELDS, may_be_empty=("collections",))

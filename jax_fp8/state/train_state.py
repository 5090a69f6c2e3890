"""Everything a training step reads and writes, as one pytree."""

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

from jax_fp8.core.ids import check_integers_are_kept
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

GRADIENTS = "_overwrite_with_gradient"  # the FP8 state of Flax's own layers
STATE_REMEDY = "call step(state, batch) with TrainState.create(variables=..., tx=tx)"


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class TrainState:
    """`step` int32[], `params`, `fp8` (the amax state, {} for recipes without), `opt_state`, `cache` (the weights in
    FP8, or {}), and `collections`: other variables of the model by the names of their collections, as "batch_stats".
    """

    step: jax.Array
    params: Any
    fp8: Any
    opt_state: Any
    cache: Any = field(default_factory=dict)
    collections: Any = field(default_factory=dict)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        """Without collections as if there were no such field: so are states that were saved before there was one."""
        has_none = isinstance(self.collections, Mapping) and not self.collections
        names = FIELDS[:-1] if has_none else FIELDS
        return [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names], names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], children: Iterable[Any]) -> "TrainState":
        return cls(**dict(zip(names, children, strict=True)))

    @classmethod
    def create(cls, *, variables: Mapping, tx: optax.GradientTransformation) -> "TrainState":
        """The state before the first step, of copies: a step may donate its state. `variables` stay as they are, and so
        does what `tx` was made with, such as a random key.

        Args:
          variables: what `model.init` returned: "params", and "fp8" where the recipe has state; with "fp8_cache" from
            `cast_weights`, steps read the weights from there and the optimizer writes them there. All other collections
            become `collections`, which a loss with `has_aux` moves. The state has arrays alone: names of dims that
            params carry (`nn.LogicallyPartitioned`) are taken off.
          tx: the optimizer.
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
                f'the collection "{GRADIENTS}" holds what gradients replace, which no loss returns, got it among '
                f"{sorted(variables)}; take layers of jax_fp8, or a loop of your own"
            )
        with inside_mesh_of(params):
            opt_state = _of_own_arrays(tx.init, params)
            return cls(jnp.zeros((), jnp.int32), params, dict(fp8), opt_state, dict(cache), others)

    @property
    def variables(self) -> dict:
        """For `model.apply`."""
        own = dict(zip(OWN_COLLECTIONS, (self.params, self.fp8, self.cache), strict=True))
        return {name: tree for name, tree in own.items() if tree or name == "params"} | self.collections

    def replace(self, **changes: Any) -> "TrainState":
        """Another state with these fields changed; new params or scales are cast to FP8 again where the state keeps
        such copies.
        """
        new = dataclasses.replace(self, **changes)
        if not new.cache or "cache" in changes or not {"params", "fp8"} & set(changes):
            return new
        return dataclasses.replace(new, cache=refresh(new.cache, new.params, new.fp8))


def _of_own_arrays(init: Callable, params: Any) -> Any:
    """`init(params)` without arrays that somebody else has too: those of `params`, those that `init` was made with,
    such as a random key, and those that stand twice in it, are copied. Large moments that it makes are not.
    """
    made = init(params)
    leaves, tree = jax.tree.flatten(made)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((params, leaves))):
        return made
    traced = jax.make_jaxpr(init)(params).jaxpr
    fresh = {var for equation in traced.eqns for var in equation.outvars}
    owned = []
    for leaf, var in zip(leaves, traced.outvars, strict=True):
        is_own = not isinstance(var, Literal) and var in fresh
        owned.append(leaf if is_own or not isinstance(leaf, jax.Array) else jnp.copy(leaf))
        fresh -= {var} if is_own else set()
    return tree.unflatten(owned)


def check_given(state: Any, batch: Any) -> None:
    """Raise unless these can be what a step takes."""
    check_is("state", state, TrainState, STATE_REMEDY)
    check_holds_arrays("batch", batch)
    check_integers_are_kept(batch)


def placed_state(placement: Placement, state: TrainState) -> TrainState:
    """Where a state lies on a mesh: the collections of its model are whole on every device, whatever they are named."""
    whole = NamedSharding(placement.parallel.mesh, PartitionSpec())
    places = placement.shardings(dataclasses.replace(state, collections={}))
    return dataclasses.replace(places, collections=jax.tree.map(lambda _: whole, state.collections))


FIELDS = tuple(field.name for field in dataclasses.fields(TrainState))
register_serialization(TrainState, FIELDS, may_be_empty=("collections",))
